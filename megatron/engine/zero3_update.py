"""The update of ZeRO 3, made by DeepSpeed's optimizer: learning rate and loss scale go in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.optimizer.loss_scale import LossScale
from megatron.optimizer.mixed_precision import UpdateOutcome
from megatron.optimizer.progress import OptimizerProgress, StepCounter


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
        self._steps = StepCounter(loss_scale)

    @property
    def shards(self) -> Mapping[str, range] | None:
        """None: checkpoints get whole tensors, gathered from DeepSpeed's."""
        return None

    def begin_step(self) -> None:
        """Set the loss scale. To be called before the first backward of a step."""
        if self._steps.loss_scale is not None:
            self._zero.override_loss_scale(self._steps.loss_scale)

    def step(self) -> UpdateOutcome:
        """Make DeepSpeed's step at the boundary: it unscales, clips by the norm over all data ranks, and updates.

        Collective over the data group. Raises DivergenceError when the gradients have not been finite for
        MAX_SKIPPED_IN_A_ROW steps.
        """
        learning_rate = self._schedule.at(self._steps.num_updates + 1)
        scale = self._steps.loss_scale
        self._zero.set_lr(learning_rate)
        self._engine.step()
        skipped = not self._engine.was_step_applied()
        device = self._engine.device
        norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=device)
        self._steps.count(skipped=skipped)
        return UpdateOutcome(norm, torch.tensor(float(skipped), device=device), learning_rate, scale)

    @property
    def progress(self) -> OptimizerProgress:
        """Counters and loss scale after the last step."""
        return self._steps.progress

    def restore_progress(self, progress: OptimizerProgress) -> None:
        """Go on from a checkpoint's counters and loss scale, of whichever ZeRO stage."""
        self._steps.restore(progress)

    def refresh_masters(self) -> None:
        """Do nothing: loading a weight has set its master."""
