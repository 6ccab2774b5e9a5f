"""The update of ZeRO 3, made by DeepSpeed's optimizer: our learning rate goes in, what became of it comes out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.errors import DivergenceError
from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.optimizer.mixed_precision import MAX_SKIPPED_IN_A_ROW, OptimizerProgress, UpdateOutcome

_log = logging.getLogger(__name__)


class Zero3Update:
    """Counts the updates of a DeepSpeed engine with ZeRO 3 and sets the learning rate of the next."""

    def __init__(self, engine: DeepSpeedEngine, schedule: LearningRateSchedule, device: torch.device) -> None:
        self._engine = engine
        self._zero: Any = engine.optimizer
        self._schedule = schedule
        self._device = device
        self._scaler = _Scaler(self._zero.loss_scaler)
        self._num_updates = 0
        self._num_skipped = 0
        self._skipped_in_a_row = 0

    def step(self) -> UpdateOutcome:
        """Make DeepSpeed's step at the boundary: it unscales, clips by the norm of all data ranks, and updates.

        Collective over the data group. Raises DivergenceError when the gradients have not been finite for
        MAX_SKIPPED_IN_A_ROW steps.
        """
        learning_rate = self._schedule.at(self._num_updates + 1)
        scale = self._scaler.scale if self._zero.dtype == torch.float16 else None
        self._zero.set_lr(learning_rate)
        self._engine.step()
        skipped = not self._engine.was_step_applied()
        self._count(skipped=skipped, scale_moved=scale is not None and scale != self._scaler.scale)
        norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=self._device)
        return UpdateOutcome(norm, torch.tensor(float(skipped), device=self._device), learning_rate, scale)

    def _count(self, *, skipped: bool, scale_moved: bool) -> None:
        if not skipped:
            self._num_updates += 1
            self._skipped_in_a_row = 0
            return
        self._num_skipped += 1
        self._skipped_in_a_row += 1
        scale = f", loss scale now {self._scaler.scale:g}" if self._zero.dtype == torch.float16 else ""
        _log.info("gradients were not finite: update skipped, %d so far%s", self._num_skipped, scale)
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW and not scale_moved:
            raise DivergenceError(
                f"gradients have not been finite for {self._skipped_in_a_row} steps in a row{scale}: training has "
                "diverged"
            )

    @property
    def progress(self) -> OptimizerProgress:
        """Counters and loss scale after the last step, as ZeRO 0 has them."""
        return OptimizerProgress(self._num_updates, self._num_skipped, self._scaler.state())

    def restore_progress(self, progress: OptimizerProgress) -> None:
        """Go on from a checkpoint's counters and loss scale, of whichever ZeRO stage."""
        self._num_updates, self._num_skipped = progress.num_updates, progress.num_skipped
        self._scaler.restore(progress.loss_scale)

    def refresh_masters(self) -> None:
        """Do nothing: loading a weight has set its master."""


class _Scaler:
    """DeepSpeed's loss scaler, with its state said in the words of ours so that the stage may change on resume.

    It doubles one step later than ours: at a step that `window` clean ones came before, not at the last of them.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        # DeepSpeed would end the run at the minimum, at the first overflow there; we count as everywhere.
        scaler.raise_error_at_min_scale = False

    @property
    def scale(self) -> float:
        return float(self._scaler.cur_scale)

    def state(self) -> dict[str, float]:
        if not self._scaler.dynamic:
            return {}
        since_overflow = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
        return {
            "value": self.scale,
            "forgiven_left": self._scaler.cur_hysteresis,
            "clean_steps": max(since_overflow - 1, 0),
            "deepspeed_clean_steps": since_overflow,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        if not state or not self._scaler.dynamic:
            return
        since_overflow = int(state.get("deepspeed_clean_steps", state["clean_steps"] + 1))
        self._scaler.cur_scale = state["value"]
        self._scaler.cur_hysteresis = int(state["forgiven_left"])
        self._scaler.cur_iter, self._scaler.last_overflow_iter = since_overflow, -1
