"""ZeRO 3: DeepSpeed's own engine and gradient path, behind the surface that the loop knows.

DeepSpeed shards weights, gradients and optimizer state over the data ranks, gathers a layer's weights when it runs, and
reduces each gradient to the rank that owns it, in every micro-batch. Ours are learning rate and loss scale, the loss
averaged over ranks, the counters, and the way into checkpoints and out again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.engine.results import StepResult
from megatron.engine.shell import skip_shared_memory_collective
from megatron.engine.surface import EngineTensors, OnDevice
from megatron.engine.zero3_state import PartitionedState, allocate_optimizer_state
from megatron.engine.zero3_update import Zero3Update
from megatron.errors import ConfigError
from megatron.mpu.grid import AxisGroup
from megatron.optimizer.choice import UpdateRule
from megatron.optimizer.weights import OwnedWeights


class Zero3Engine:
    """Trains one stage whose parameters are sharded over the data ranks; see `build_zero3_engine`."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        optimizer: Zero3Update,
        state: PartitionedState,
        data_group: AxisGroup,
        put_back: Callable[[], None],
    ) -> None:
        self.module: torch.nn.Module = engine.module
        self.optimizer = optimizer
        self.num_micro_batches: int = engine.gradient_accumulation_steps()
        self._engine = engine
        self._state = state
        self._data_group = data_group
        self._device: torch.device = engine.device
        self._put_back = put_back

    def train_batch(self, micro_batches: Iterator[OnDevice], *, stop_requested: bool = False) -> StepResult:
        """Take `gradient_accumulation_steps` micro-batches from the iterator and make one step.

        Collective over the data group. `stop_requested` travels with the loss, so that all ranks learn in the same step
        that one of them wants to stop. After an exception DeepSpeed's state is undefined: no other step can be made.
        """
        self._engine.train()
        self.optimizer.begin_step()
        total = torch.zeros((), device=self._device)
        for index in range(self.num_micro_batches):
            loss = self._engine(next(micro_batches).to(self._device))
            self._engine.backward(loss)
            total += loss.detach()
            if index < self.num_micro_batches - 1:
                self._engine.step()
        outcome = self.optimizer.step()
        shared = self._sum_over_data_ranks(total / self.num_micro_batches, float(stop_requested))
        return StepResult(
            loss=shared[0] / self._data_group.size,
            grad_norm=outcome.grad_norm,
            learning_rate=outcome.learning_rate,
            loss_scale=outcome.loss_scale,
            skipped=outcome.skipped,
            stop_requested=shared[1],
            # DeepSpeed does not say.
            grad_reduce=None,
            param_gather=None,
        )

    @torch.no_grad()
    def eval_batch(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Return the mean loss of as many micro-batches as a training step takes, over all data ranks; shape ().

        Collective over the data group: weights are gathered layer by layer.
        """
        self._engine.eval()
        losses = [self._engine(next(micro_batches).to(self._device)) for _ in range(self.num_micro_batches)]
        return self._sum_over_data_ranks(torch.stack(losses).float().mean())[0] / self._data_group.size

    def tensors_to_save(self, *, is_writer: bool, with_optimizer: bool) -> EngineTensors:
        """Return copies in host memory on a rank that `is_writer`, nothing on the others.

        Collective over the data group.
        """
        return self._state.gather(is_writer=is_writer, with_optimizer=with_optimizer)

    def tensors_to_load(self) -> EngineTensors:
        """Return what a checkpoint's whole tensors are copied into; each rank keeps its part.

        Copying a weight is collective over the data group.
        """
        return self._state.targets()

    def close(self) -> None:
        """Let DeepSpeed clean up after itself, and put back what it replaced in torch."""
        self._engine.destroy()
        self._put_back()

    def _sum_over_data_ranks(self, *values: torch.Tensor | float) -> torch.Tensor:
        """Return the sum over data ranks of each value, in one small all-reduce; shape (len(values),)."""
        shared = torch.stack([torch.as_tensor(value, dtype=torch.float32, device=self._device) for value in values])
        if self._data_group.handle is not None:
            dist.all_reduce(shared, group=self._data_group.handle)
        return shared


def build_zero3_engine(
    module: torch.nn.Module,
    *,
    data_group: AxisGroup,
    deepspeed_config: Mapping[str, Any],
    update: UpdateRule,
) -> Zero3Engine:
    """Return an engine that trains `module`, a whole fp32 module that maps a micro-batch to its mean loss.

    Collective over the world. `deepspeed_config` decides precision, clipping, and how things are sharded; of `update`
    optimizer, schedule and loss scale are taken. DeepSpeed shards a module that is whole on every rank's device for a
    moment. Raises ConfigError for a frozen parameter.
    """
    skip_shared_memory_collective()
    _silence_deprecations()
    parameters = dict(module.named_parameters())
    if frozen := [name for name, parameter in parameters.items() if not parameter.requires_grad]:
        raise ConfigError(f"ZeRO 3 trains all parameters here, but {', '.join(frozen)} are frozen")
    config = dict(deepspeed_config)
    is_cast = bool({"bf16", "fp16"} & config.keys())
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()} if is_cast else {}
    linear = torch.nn.functional.linear
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    inner = update.build_inner(OwnedWeights(parameters, parameters, shapes))
    with _fp16_on_any_device():
        engine, *_ = deepspeed.initialize(model=module, optimizer=inner, config=config, dist_init_required=False)
    allocate_optimizer_state(engine.optimizer)
    state = PartitionedState(engine.optimizer, parameters, data_group.rank)
    for name in list(start):
        # DeepSpeed made its masters of weights that it had already cast.
        state.write_master(parameters[name], start.pop(name))
    optimizer = Zero3Update(engine, schedule=update.schedule, loss_scale=update.loss_scale)

    def put_back() -> None:
        torch.nn.functional.linear = linear

    return Zero3Engine(engine, optimizer, state, data_group, put_back)


@contextmanager
def _fp16_on_any_device() -> Iterator[None]:
    """Have DeepSpeed take fp16 where it has no fast kernels: torch computes it everywhere, and so do ZeRO 0 to 2."""
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported


def _silence_deprecations() -> None:
    """Say nothing of torch's new names for the collectives that DeepSpeed calls: no user can do anything about them."""
    names = "all_gather_into_tensor|reduce_scatter_tensor"
    warnings.filterwarnings("ignore", f".*({names})` is deprecated", FutureWarning)
