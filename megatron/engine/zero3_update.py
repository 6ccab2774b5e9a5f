"""The update of ZeRO 3, made by DeepSpeed's optimizer: learning rate and loss scale go in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.errors import DivergenceError
from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.optimizer.loss_scale import LossScale
from megatron.optimizer.mixed_precision import MAX_SKIPPED_IN_A_ROW, OptimizerProgress, UpdateOutcome

_log = logging.getLogger(__name__)


class Zero3Update:
    """Counts the updates of a DeepSpeed engine with ZeRO 3 and sets learning rate and loss scale of the next.

    The scale is ours, not that of DeepSpeed's scaler, which moves between overflow check and unscaling: in a step whose
    scale doubles, its gradients, their norm and what clipping makes of them would be half of what they are.
    """

    def __init__(
        self, engine: DeepSpeedEngine, *, schedule: LearningRateSchedule, loss_scale: LossScale | None
    ) -> None:
        self._engine = engine
        self._zero: Any = engine.optimizer
        self._schedule = schedule
        self._loss_scale = loss_scale
        self._num_updates = 0
        self._num_skipped = 0
        self._skipped_in_a_row = 0

    @property
    def shards(self) -> Mapping[str, range] | None:
        """None: checkpoints get whole tensors, gathered from DeepSpeed's."""
        return None

    def begin_step(self) -> None:
        """Set the loss scale. To be called before the first backward of a step."""
        if self._loss_scale is not None:
            self._zero.override_loss_scale(self._loss_scale.value)

    def step(self) -> UpdateOutcome:
        """Make DeepSpeed's step at the boundary: it unscales, clips by the norm over all data ranks, and updates.

        Collective over the data group. Raises DivergenceError when the gradients have not been finite for
        MAX_SKIPPED_IN_A_ROW steps.
        """
        learning_rate = self._schedule.at(self._num_updates + 1)
        scale = None if self._loss_scale is None else self._loss_scale.value
        self._zero.set_lr(learning_rate)
        self._engine.step()
        skipped = not self._engine.was_step_applied()
        device = self._engine.device
        norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=device)
        self._count(skipped=skipped)
        return UpdateOutcome(norm, torch.tensor(float(skipped), device=device), learning_rate, scale)

    def _count(self, *, skipped: bool) -> None:
        scale_moved = self._loss_scale is not None and self._loss_scale.update(overflowed=skipped)
        if not skipped:
            self._num_updates += 1
            self._skipped_in_a_row = 0
            return
        self._num_skipped += 1
        self._skipped_in_a_row += 1
        scale = "" if self._loss_scale is None else f", loss scale now {self._loss_scale.value:g}"
        _log.info("gradients were not finite: update skipped, %d so far%s", self._num_skipped, scale)
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW and not scale_moved:
            raise DivergenceError(
                f"gradients have not been finite for {self._skipped_in_a_row} steps in a row{scale}: training has "
                "diverged"
            )

    @property
    def progress(self) -> OptimizerProgress:
        """Counters and loss scale after the last step."""
        loss_scale = {} if self._loss_scale is None else self._loss_scale.state()
        return OptimizerProgress(self._num_updates, self._num_skipped, loss_scale)

    def restore_progress(self, progress: OptimizerProgress) -> None:
        """Go on from a checkpoint's counters and loss scale, of whichever ZeRO stage."""
        self._num_updates, self._num_skipped = progress.num_updates, progress.num_skipped
        if self._loss_scale is not None:
            self._loss_scale.restore(progress.loss_scale)

    def refresh_masters(self) -> None:
        """Do nothing: loading a weight has set its master."""
