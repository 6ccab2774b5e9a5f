"""The learning rate as a pure function of the number of updates made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine", "exponential"]


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warmup to `peak`, then decay towards `minimum`, which it never falls below.

    `warmup_updates` counts the updates until the peak, `decay_updates` all updates until the end of the decay, warmup
    included; after it the rate stays where it ended.
    """

    peak: float
    minimum: float
    warmup_updates: int
    decay_updates: int
    style: DecayStyle

    def at(self, update: int) -> float:
        """Return the rate of the `update`-th update, counted from 1."""
        if update <= self.warmup_updates:
            return self.peak * update / self.warmup_updates
        decaying = max(self.decay_updates - self.warmup_updates, 1)
        progress = min(update - self.warmup_updates, decaying) / decaying
        return max(self.minimum, self._decayed(progress))

    def _decayed(self, progress: float) -> float:
        """Return the rate after the share `progress` of the decay, before the minimum is applied."""
        if self.style == "linear":
            return self.peak * (1.0 - progress)
        if self.style == "cosine":  # Loshchilov and Hutter, SGDR, 2017, without restarts
            return self.minimum + 0.5 * (self.peak - self.minimum) * (1.0 + math.cos(math.pi * progress))
        if self.style == "exponential":  # one half-life over the whole decay, as NeoX has it
            return self.peak * 0.5**progress
        return self.peak
