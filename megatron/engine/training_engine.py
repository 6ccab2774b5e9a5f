"""The training step: micro-batches forward and backward, reduction under the last backward, update.

The loop calls `train_batch` and `eval_batch` and knows nothing of what is parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.data_parallel.grad_reducer import GradReducer
from megatron.data_parallel.roll_call import is_communication_failure
from megatron.engine.executor import Executor, GradientPath
from megatron.engine.overlap_watch import OverlapWatch
from megatron.engine.prove import OverlapProof
from megatron.engine.results import StepCommunication, StepResult
from megatron.engine.surface import EngineTensors, OnDevice
from megatron.errors import LostRankError
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
        *,
        num_proving_steps: int = 0,
    ) -> None:
        self.module: torch.nn.Module = executor.module
        self.num_micro_batches: int = executor.num_micro_batches
        self.optimizer = optimizer
        self._executor = executor
        self._reducer = reducer
        self._grid = grid
        self._gradients = GradientPath(reducer, optimizer)
        executor.connect(self._gradients)
        self._proof = OverlapProof(num_proving_steps, reducer, self._gradients)
        self._watch = OverlapWatch()

    def train_batch(self, micro_batches: Iterator[OnDevice], *, stop_requested: bool = False) -> StepResult:
        """Take `gradient_accumulation_steps` micro-batches from the iterator and make one step.

        Collective over the world; only first and last stage take anything from the iterator. `stop_requested` travels
        with the loss, so that all ranks learn in the same step that one of them wants to stop. After an exception the
        parameters are as they were; with one stage nothing is left in flight and training may go on, with several the
        other stages wait for this rank until it ends or the timeout of the process group has passed.
        """
        with self._lost_ranks_named():
            return self._train_batch(micro_batches, stop_requested=stop_requested)

    def _train_batch(self, micro_batches: Iterator[OnDevice], *, stop_requested: bool) -> StepResult:
        try:
            loss = self._run(micro_batches)
        except LostRankError:  # whatever else is tried with that rank fails as well
            raise
        except Exception as error:  # an interrupt ends the process: waiting for other ranks would only delay it
            if self._executor.can_go_on_after_error and not is_communication_failure(error) and self._reducer.abort():
                self.optimizer.abandon_update()
                self._sum_over_world(float("nan"), 0.0)
                self.optimizer.gather_parameters()
            raise
        outcome = self._gradients.outcome
        assert outcome is not None, "DeepSpeed made no optimizer step at the boundary"
        shared = self._sum_over_world(loss, float(stop_requested))
        self.optimizer.gather_parameters()  # after that sum, which would have to wait for what the gather sends
        result = StepResult(
            loss=shared[0] / self._num_losses,
            grad_norm=outcome.grad_norm,
            learning_rate=outcome.learning_rate,
            loss_scale=outcome.loss_scale,
            skipped=outcome.skipped,
            stop_requested=shared[1],
            grad_reduce=StepCommunication.of(self._reducer.collectives),
            param_gather=StepCommunication.of(self.optimizer.gathers),
        )
        if self._reducer.overlap and not self._reducer.delayed:
            self._watch.add(result.grad_reduce)
        return result

    def _run(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Forward and backward of all micro-batches, reduction and update; return their mean loss on this rank."""
        if self._proof.steps_left:
            return self._proof.run(self._executor, micro_batches)
        self._reducer.begin_step(self.num_micro_batches)
        return self._executor.run(micro_batches)

    def eval_batch(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Return the mean loss of as many micro-batches as a training step takes, over all data ranks; shape ().

        Collective over the world. Touches no gradient and launches no reduction. Refused while a step is open.
        """
        self._reducer.refuse_in_step("eval_batch()")
        self.optimizer.wait_for_parameters()
        with self._lost_ranks_named():
            return self._sum_over_world(self._executor.evaluate(micro_batches))[0] / self._num_losses

    def tensors_to_save(self, *, is_writer: bool, with_optimizer: bool) -> EngineTensors:
        """Return the live tensors: every data rank has them whole, and nothing is copied."""
        return self.tensors_to_load()

    def tensors_to_load(self) -> EngineTensors:
        """Return the live tensors."""
        self.optimizer.wait_for_parameters()
        return EngineTensors(dict(self.module.named_parameters()), self.optimizer.named_state())

    def close(self) -> None:
        """Take our hooks off the module and let DeepSpeed clean up after itself."""
        self._reducer.close()
        self.optimizer.close()
        self._executor.close()

    @contextmanager
    def _lost_ranks_named(self) -> Iterator[None]:
        """Turn the failure of whatever ranks exchange inside into a LostRankError; buckets have their own."""
        try:
            yield
        except RuntimeError as error:
            if not is_communication_failure(error):
                raise
            what = "what ranks exchange besides gradients (losses, norms, activations) did not arrive"
            raise self._reducer.lost_rank(what, range(self._grid.world_size), error) from error

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
