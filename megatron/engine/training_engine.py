"""The training step: micro-batches forward and backward, reduction under the last backward, update.

One stage here; gradient accumulation is the one-stage schedule. The loop calls `train_batch` and `eval_batch` and knows
nothing of what is parallel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron.data_parallel.grad_reducer import GradReducer
from megatron.engine.results import StepCommunication, StepResult
from megatron.engine.shell import ShellEngine, UpdateSeam
from megatron.engine.surface import EngineTensors, OnDevice
from megatron.mpu.grid import AxisGroup
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer, UpdateOutcome


class TrainingEngine:
    """One stage of data-parallel training.

    `module` maps a micro-batch to its mean loss. Everything else has been built on the same plan: see `build_engine`.
    """

    def __init__(
        self,
        shell: ShellEngine,
        seam: UpdateSeam,
        reducer: GradReducer,
        optimizer: MixedPrecisionOptimizer,
        data_group: AxisGroup,
    ) -> None:
        self.module: torch.nn.Module = shell.module
        self.optimizer = optimizer
        self._shell = shell
        self._reducer = reducer
        self._data_group = data_group
        self.num_micro_batches: int = shell.gradient_accumulation_steps()
        self._device: torch.device = shell.device
        self._outcome: UpdateOutcome | None = None
        seam.connect(self._update)

    def train_batch(self, micro_batches: Iterator[OnDevice], *, stop_requested: bool = False) -> StepResult:
        """Take `gradient_accumulation_steps` micro-batches from the iterator and make one step.

        Collective over the data group. `stop_requested` travels with the loss, so that all ranks learn in the same step
        that one of them wants to stop. An exception leaves nothing in flight, and the parameters as they were.
        """
        self._shell.train()
        self._reducer.begin_step()
        try:
            loss = self._run_micro_batches(micro_batches)
        except Exception:  # an interrupt ends the process: waiting for other ranks would only delay it
            self._reducer.abort()
            raise
        assert self._outcome is not None, "DeepSpeed made no optimizer step at the boundary"
        shared = self._sum_over_data_ranks(loss, float(stop_requested))
        buckets = self._reducer.bucket_times
        return StepResult(
            loss=shared[0] / self._data_group.size,
            grad_norm=self._outcome.grad_norm,
            learning_rate=self._outcome.learning_rate,
            loss_scale=self._outcome.loss_scale,
            skipped=self._outcome.skipped,
            stop_requested=shared[1],
            communication=StepCommunication(buckets) if self._data_group.size > 1 else None,
        )

    def _run_micro_batches(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Forward, backward and DeepSpeed's step for each micro-batch; the last one reduces and updates."""
        total = torch.zeros((), device=self._device)
        for index in range(self.num_micro_batches):
            loss = self._shell(next(micro_batches).to(self._device))
            is_boundary = index == self.num_micro_batches - 1
            with self._reducer.backward_pass(is_boundary=is_boundary):
                self._shell.backward(self.optimizer.scale_loss(loss))
            if is_boundary:
                self._reducer.finish()
            self._shell.step()
            total += loss.detach()
        return total / self.num_micro_batches

    @torch.no_grad()
    def eval_batch(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Return the mean loss of as many micro-batches as a training step takes, over all data ranks; shape ().

        Collective over the data group. Touches no gradient and launches no reduction.
        """
        self._shell.eval()
        losses = [self.module(next(micro_batches).to(self._device)) for _ in range(self.num_micro_batches)]
        return self._sum_over_data_ranks(torch.stack(losses).float().mean())[0] / self._data_group.size

    def tensors_to_save(self, *, is_writer: bool, with_optimizer: bool) -> EngineTensors:
        """Return the live tensors: every data rank has them whole, and nothing is copied."""
        return self.tensors_to_load()

    def tensors_to_load(self) -> EngineTensors:
        """Return the live tensors."""
        return EngineTensors(dict(self.module.named_parameters()), self.optimizer.named_state())

    def close(self) -> None:
        """Take our hooks off the module and let DeepSpeed clean up after itself."""
        self._reducer.close()
        self._shell.destroy()

    def _update(self) -> None:
        self._outcome = self.optimizer.step()

    def _sum_over_data_ranks(self, *values: torch.Tensor | float) -> torch.Tensor:
        """Return the sum over data ranks of each value, in one small all-reduce; shape (len(values),)."""
        shared = torch.stack([torch.as_tensor(value, dtype=torch.float32, device=self._device) for value in values])
        if self._data_group.handle is not None:
            dist.all_reduce(shared, group=self._data_group.handle)
        return shared
