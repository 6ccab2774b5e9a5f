"""Put a training engine together: DeepSpeed's shell, masters, rehearsal, plan, reducer, optimizer, in this order.

Each step needs what the one before it settled: DeepSpeed takes fp32 weights, the cast decides the dtypes of gradients,
the rehearsal their order, the order the buckets, the buckets what the optimizer works on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.data_parallel.grad_bucket import ReductionArithmetic
from megatron.data_parallel.grad_reducer import GradReducer
from megatron.data_parallel.partition import ReductionGroup, ReductionPlan, plan_buckets
from megatron.data_parallel.ready_order import agree_on_order, check_plans_agree
from megatron.engine.rehearsal import rehearse
from megatron.engine.shell import initialize_shell
from megatron.engine.surface import OnDevice
from megatron.engine.training_engine import TrainingEngine
from megatron.mpu.grid import ParallelGrid
from megatron.optimizer.choice import UpdateRule
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer, master_weights

_log = logging.getLogger(__name__)

# Buckets of this many elements were the fastest of those measured; see docs/measurements.md.
DEFAULT_BUCKET_ELEMENTS = 1_000_000


@dataclass(frozen=True)
class ReductionSettings:
    """When and how gradients are reduced. `bucket_elements` None leaves the size to the default."""

    overlap: bool
    arithmetic: ReductionArithmetic
    bucket_elements: int | None = None
    check_for_nan: bool = False


def build_engine(
    module: torch.nn.Module,
    *,
    grid: ParallelGrid,
    deepspeed_config: Mapping[str, Any],
    dtype: torch.dtype,
    reduction: ReductionSettings,
    update: UpdateRule,
    rehearsal_batch: OnDevice,
) -> TrainingEngine:
    """Return an engine that trains `module`, an fp32 module that maps a micro-batch to its mean loss.

    Collective over the world. Parameters are cast to `dtype` in place. `rehearsal_batch` is a synthetic micro-batch of
    the size that training uses.
    """
    shell, seam = initialize_shell(module, deepspeed_config)
    parameters = dict(module.named_parameters())
    masters = master_weights(parameters, dtype)
    trained = {name: parameters[name] for name in masters}
    group = ReductionGroup("data", grid.data.size, grid.data.size, grid.data.handle)
    order = agree_on_order(rehearse(module, rehearsal_batch.to(shell.device), trained), group.handle)
    plan = plan_buckets(
        order, trained, lambda _: group, bucket_elements=reduction.bucket_elements or DEFAULT_BUCKET_ELEMENTS
    )
    check_plans_agree(plan, group.handle)
    _log_plan(plan, reduction)
    reducer = GradReducer(
        parameters,
        plan,
        arithmetic=reduction.arithmetic,
        overlap=reduction.overlap,
        check_for_nan=reduction.check_for_nan,
    )
    optimizer = MixedPrecisionOptimizer(
        parameters,
        masters,
        reducer,
        inner=update.build_inner(masters),
        schedule=update.schedule,
        loss_scale=update.loss_scale,
        max_norm=update.max_norm,
    )
    return TrainingEngine(shell, seam, reducer, optimizer, grid.data)


def _log_plan(plan: ReductionPlan, reduction: ReductionSettings) -> None:
    """Say once what is reduced in this run, with whom, in how many pieces, and when."""
    groups = {bucket.group for bucket in plan.buckets}
    for group in sorted(groups, key=lambda group: group.name):
        buckets = [bucket for bucket in plan.buckets if bucket.group == group]
        if group.size == 1:
            _log.info("gradients of group %s: one rank, nothing to reduce", group.name)
            continue
        elements = sum(bucket.num_elements for bucket in buckets)
        _log.info(
            "gradients of group %s: %d ranks, %d buckets, %.1f MB on the wire as %s, launched %s",
            group.name,
            group.size,
            len(buckets),
            elements * reduction.arithmetic.wire_dtype.itemsize / 1e6,
            str(reduction.arithmetic.wire_dtype).removeprefix("torch."),
            "under the last backward (overlap_grad_reduce)" if reduction.overlap else "after the last backward",
        )
