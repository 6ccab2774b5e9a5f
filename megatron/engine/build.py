"""Put a training engine together: DeepSpeed's shell, masters, rehearsal, plan, reducer, optimizer, in this order.

Each step needs what the one before it settled: DeepSpeed takes fp32 weights, the cast decides the dtypes of gradients,
the rehearsal their order, the order the buckets, the buckets what the optimizer works on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron.data_parallel.agreement import check_ranks_agree, parameter_lines
from megatron.data_parallel.grad_reducer import GradReducer
from megatron.data_parallel.param_gather import ParameterGather
from megatron.data_parallel.partition import ReductionPlan, plan_buckets
from megatron.data_parallel.ready_order import agree_on_order
from megatron.data_parallel.roll_call import RollCall
from megatron.engine.executor import Executor
from megatron.engine.one_stage import OneStage
from megatron.engine.pipeline import PipelineStage
from megatron.engine.reduction_groups import ReductionGroups, tied_weight
from megatron.engine.reduction_report import reduction_table, why_overlap_is_impossible
from megatron.engine.reduction_settings import ReductionSettings
from megatron.engine.rehearsal import rehearse
from megatron.engine.surface import OnDevice
from megatron.engine.training_engine import TrainingEngine
from megatron.mpu.grid import ParallelGrid
from megatron.mpu.tensor_parallel import parameter_placements
from megatron.optimizer.choice import UpdateRule
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.optimizer.weights import cast_parameters, shard_weights

_log = logging.getLogger(__name__)


def build_engine(
    module: torch.nn.Module,
    *,
    grid: ParallelGrid,
    deepspeed_config: Mapping[str, Any],
    dtype: torch.dtype,
    reduction: ReductionSettings,
    update: UpdateRule,
    rehearsal_batch: OnDevice,
    roll_call: RollCall | None = None,
) -> TrainingEngine:
    """Return an engine that trains `module`, an fp32 module that maps a micro-batch to its mean loss.

    With several pipeline stages it is this rank's stage, a `StageModule`.

    Collective over the world. Parameters are cast to `dtype` in place. `rehearsal_batch` is a synthetic micro-batch of
    the size that training uses. `roll_call` finds out who is missing when a collective fails.
    """
    parameters = dict(module.named_parameters())
    world = dist.group.WORLD if grid.world_size > 1 else None
    check_ranks_agree(
        {
            "the settings of the run": [
                *reduction.lines(),
                *(f"{key} {value}" for key, value in deepspeed_config.items()),
                f"dtype {dtype}",
            ],
            f"the parameters of stage {grid.pipe.rank}": parameter_lines(parameters),
        },
        world,
    )
    executor = build_executor(module, grid, deepspeed_config)
    weights = cast_parameters(parameters, dtype)
    trained = {name: parameters[name] for name in weights.masters}
    groups = ReductionGroups(grid, parameter_placements(module), tied_weight(module))
    seen = rehearse(lambda: executor.rehearsal_loss(rehearsal_batch), trained)
    order = groups.tied_last(agree_on_order(seen, grid.stage.handle))
    plan = plan_buckets(
        order,
        trained,
        groups.group_of,
        bucket_elements=reduction.bucket_elements,
        sharded=reduction.zero_stage >= 1,
    )
    check_ranks_agree(
        {
            f"the gradient buckets of stage {grid.pipe.rank}": plan.lines(),
            **({"the tied weight of first and last stage": plan.lines_between_stages()} if grid.tied else {}),
        },
        world,
    )
    _log_reduction(plan, reduction, grid, executor.device)
    reducer = GradReducer(
        parameters,
        plan,
        arithmetic=reduction.arithmetic,
        overlap=reduction.overlap,
        delayed=reduction.delay_on_later_stages and grid.pipe.rank > 0,
        scatter_every_backward=reduction.zero_stage >= 2,
        check_for_nan=reduction.check_for_nan,
        roll_call=roll_call,
    )
    gather = ParameterGather(parameters, plan, overlapped_by=module if reduction.overlap_param_gather else None)
    weights = shard_weights(weights, gather)
    optimizer = MixedPrecisionOptimizer(
        weights,
        reducer,
        inner=update.build_inner(weights),
        schedule=update.schedule,
        loss_scale=update.loss_scale,
        max_norm=update.max_norm,
        norm=groups.global_norm(executor.device, trained, sharded=reduction.zero_stage >= 1),
        gather=gather,
    )
    return TrainingEngine(executor, reducer, optimizer, grid, num_proving_steps=reduction.num_proving_steps)


def build_executor(module: torch.nn.Module, grid: ParallelGrid, deepspeed_config: Mapping[str, Any]) -> Executor:
    """Return what runs `module`. Collective over the world."""
    if grid.pipe.size == 1:
        return OneStage(module, grid, deepspeed_config)
    return PipelineStage(module, grid, deepspeed_config)


def _log_reduction(plan: ReductionPlan, reduction: ReductionSettings, grid: ParallelGrid, device: torch.device) -> None:
    """Say once what is reduced in this run, with whom, in how many pieces, and when."""
    _log.info("reduction of gradients:\n%s", reduction_table(plan, reduction, grid))
    reason = why_overlap_is_impossible(device.type, grid.tensor.size) if reduction.overlap else None
    if reason is not None:
        _log.warning("overlap_grad_reduce is on, but nothing will be hidden: %s", reason)
