"""What runs the micro-batches of a step, as the training engine sees it, and what it calls back into.

Two implementations: `one_stage`, over DeepSpeed's plain engine, and `pipeline`, over its pipeline engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from megatron.data_parallel.grad_reducer import GradReducer
from megatron.engine.surface import OnDevice
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer, UpdateOutcome


class GradientPath:
    """Where gradients go: what an executor calls around each backward and at the end of a step."""

    def __init__(self, reducer: GradReducer, optimizer: MixedPrecisionOptimizer) -> None:
        self._reducer = reducer
        self._optimizer = optimizer
        self._then: Callable[[], None] = self.update
        self.outcome: UpdateOutcome | None = None

    def backward_pass(self) -> AbstractContextManager[None]:
        """Return the bracket around a micro-batch's backward."""
        return self._reducer.backward_pass()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward on. For the stage that has the loss."""
        return self._optimizer.scale_loss(loss)

    def finish(self) -> None:
        """Complete the reduction, right before the update."""
        self._reducer.finish()

    def on_reduced(self) -> None:
        """Do what follows the reduction: update the parameters, unless something else was asked for."""
        self._then()

    def update(self) -> None:
        """Update the parameters."""
        self.outcome = self._optimizer.update()

    @contextmanager
    def when_reduced(self, then: Callable[[], None]) -> Iterator[None]:
        """Have `then` called in place of the update."""
        self._then = then
        try:
            yield
        finally:
            self._then = self.update


class Executor(Protocol):
    """Runs forward and backward of a step's micro-batches on this rank's stage, and has the parameters updated.

    `can_go_on_after_error`: whether other ranks complete a step in which this one raised, so that training may go on.
    """

    module: torch.nn.Module
    device: torch.device
    num_micro_batches: int
    can_go_on_after_error: bool

    def connect(self, gradients: GradientPath) -> None:
        """Send the gradients of every `run` on this path."""
        ...

    def rehearsal_loss(self, micro_batch: OnDevice) -> torch.Tensor:
        """Run this stage's forward by itself on a synthetic micro-batch; return a scalar to call backward on."""
        ...

    def run(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Make one step; return the mean loss over its micro-batches, zero on a stage that is not the last.

        Collective over the stages of this rank's pipeline, and over all groups of the gradient path.
        """
        ...

    def evaluate(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Return the mean loss over as many micro-batches as `run` takes, without gradients; zero likewise.

        Collective over the stages of this rank's pipeline.
        """
        ...

    def close(self) -> None:
        """Let DeepSpeed clean up after itself."""
        ...


def mean_loss(losses: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the mean over micro-batches in fp32; zero where there are none. Shape ()."""
    total = torch.zeros((), device=device)
    for loss in losses:
        total += loss.detach()
    return total / max(len(losses), 1)
