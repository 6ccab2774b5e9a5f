"""The training step: micro-batches forward and backward, reduction under the last backward, update.

The loop calls `train_batch` and `eval_batch` and knows nothing of what is parallel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron.data_parallel.grad_reducer import GradReducer
from megatron.engine.executor import Executor, GradientPath, OnDevice
from megatron.engine.results import StepCommunication, StepResult
from megatron.mpu.grid import ParallelGrid
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer


class TrainingEngine:
    """Trains this rank's stage of a model. Everything has been built on the same plan: see `build_engine`."""

    def __init__(
        self,
        executor: Executor,
        reducer: GradReducer,
        optimizer: MixedPrecisionOptimizer,
        grid: ParallelGrid,
    ) -> None:
        self.module: torch.nn.Module = executor.module
        self.num_micro_batches: int = executor.num_micro_batches
        self.optimizer = optimizer
        self._executor = executor
        self._reducer = reducer
        self._grid = grid
        self._gradients = GradientPath(reducer, optimizer)
        executor.connect(self._gradients)

    def train_batch(self, micro_batches: Iterator[OnDevice], *, stop_requested: bool = False) -> StepResult:
        """Take `gradient_accumulation_steps` micro-batches from the iterator and make one step.

        Collective over the world; only first and last stage take anything from the iterator. `stop_requested` travels
        with the loss, so that all ranks learn in the same step that one of them wants to stop. After an exception the
        parameters are as they were; with one stage nothing is left in flight and training may go on, with several the
        other stages wait for this rank until it ends or the timeout of the process group has passed.
        """
        self._reducer.begin_step(self.num_micro_batches)
        try:
            loss = self._executor.run(micro_batches)
        except Exception:  # an interrupt ends the process: waiting for other ranks would only delay it
            if self._executor.can_go_on_after_error and self._reducer.abort():
                self.optimizer.abandon_step()
                self._sum_over_world(float("nan"), 0.0)
            raise
        outcome = self._gradients.outcome
        assert outcome is not None, "DeepSpeed made no optimizer step at the boundary"
        shared = self._sum_over_world(loss, float(stop_requested))
        return StepResult(
            loss=shared[0] / self._num_losses,
            grad_norm=outcome.grad_norm,
            learning_rate=outcome.learning_rate,
            loss_scale=outcome.loss_scale,
            skipped=outcome.skipped,
            stop_requested=shared[1],
            grad_reduce=StepCommunication.of(self._reducer.collectives),
            param_gather=StepCommunication.of(self.optimizer.gathers),
        )

    def eval_batch(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Return the mean loss of as many micro-batches as a training step takes, over all data ranks; shape ().

        Collective over the world. Touches no gradient and launches no reduction. Refused while a step is open.
        """
        self._reducer.refuse_in_step("eval_batch()")
        return self._sum_over_world(self._executor.evaluate(micro_batches))[0] / self._num_losses

    def close(self) -> None:
        """Take our hooks off the module and let DeepSpeed clean up after itself."""
        self._reducer.close()
        self._executor.close()

    @property
    def _num_losses(self) -> int:
        """How many ranks contribute a loss: all those of the last stage."""
        return self._grid.stage.size

    def _sum_over_world(self, *values: torch.Tensor | float) -> torch.Tensor:
        """Return the sum over all ranks of each value, in one small all-reduce; shape (len(values),)."""
        device = self._executor.device
        shared = torch.stack([torch.as_tensor(value, dtype=torch.float32, device=device) for value in values])
        if self._grid.world_size > 1:
            dist.all_reduce(shared)
        return shared
