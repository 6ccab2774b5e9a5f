"""Where a run stands, and how it gets into a checkpoint and out again."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class StopReason(enum.Enum):
    """Why the loop ended. The value is what `exit.json` and the log say."""

    FINISHED = "reached train_iters"
    EXIT_INTERVAL = "reached a multiple of exit_interval"
    SIGNAL = "was asked to stop by a signal"


@dataclass
class TrainState:
    """Counters of a run. `iteration` is the number of steps made, skipped ones included."""

    iteration: int = 0
    consumed_train_samples: int = 0

    def advance(self, num_samples: int) -> None:
        """Count one step over `num_samples` samples."""
        self.iteration += 1
        self.consumed_train_samples += num_samples
