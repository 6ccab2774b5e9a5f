"""How far training has come: updates made, updates skipped, the loss scale, and when to give up."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.errors import DivergenceError
from megatron.optimizer.loss_scale import LossScale

_log = logging.getLogger(__name__)

# An update that overflows this many times in a row, with nothing left that the loss scale could do about it, has
# diverged: going on would only burn machines.
MAX_SKIPPED_IN_A_ROW = 50


@dataclass(frozen=True)
class OptimizerProgress:
    """Where the optimizer stands: what a checkpoint keeps of it besides tensors."""

    num_updates: int
    num_skipped: int
    loss_scale: Mapping[str, float]


class StepCounter:
    """Counts updates and moves the loss scale after each; alike on every rank."""

    def __init__(self, loss_scale: LossScale | None) -> None:
        self._loss_scale = loss_scale
        self._num_skipped = 0
        self._skipped_in_a_row = 0
        self.num_updates = 0

    @property
    def loss_scale(self) -> float | None:
        """The scale in force; None where losses are not scaled."""
        return None if self._loss_scale is None else self._loss_scale.value

    def count(self, *, skipped: bool) -> None:
        """Take in what became of a step.

        Raises DivergenceError when the gradients have not been finite for MAX_SKIPPED_IN_A_ROW steps.
        """
        scale_moved = self._loss_scale is not None and self._loss_scale.update(overflowed=skipped)
        if not skipped:
            self.num_updates += 1
            self._skipped_in_a_row = 0
            return
        self._num_skipped += 1
        self._skipped_in_a_row += 1
        scale = "" if self._loss_scale is None else f", loss scale now {self._loss_scale.value:g}"
        # On every rank alike, so rank 0, the only one to show this level, speaks for all.
        _log.info("gradients were not finite: update skipped, %d so far%s", self._num_skipped, scale)
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW and not scale_moved:
            raise DivergenceError(
                f"gradients have not been finite for {self._skipped_in_a_row} steps in a row{scale}: training has "
                "diverged"
            )

    @property
    def progress(self) -> OptimizerProgress:
        """Counters and loss scale."""
        loss_scale = {} if self._loss_scale is None else self._loss_scale.state()
        return OptimizerProgress(self.num_updates, self._num_skipped, loss_scale)

    def restore(self, progress: OptimizerProgress) -> None:
        """Go on from a checkpoint's counters and loss scale."""
        self.num_updates, self._num_skipped = progress.num_updates, progress.num_skipped
        if self._loss_scale is not None:
            self._loss_scale.restore(progress.loss_scale)
