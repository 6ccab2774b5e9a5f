"""What a step reports. Tensors stay on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.data_parallel.exposure import CollectiveTimes, CommunicationTimes, summarise


class StepCommunication:
    """Collectives of one kind in one step, turned into seconds when they are first read."""

    def __init__(self, collectives: Sequence[CollectiveTimes]) -> None:
        self.collectives = tuple(collectives)

    @classmethod
    def of(cls, collectives: Sequence[CollectiveTimes]) -> StepCommunication | None:
        """Return their communication; None where there is none."""
        return cls(collectives) if collectives else None

    @cached_property
    def _times(self) -> CommunicationTimes:
        return summarise(self.collectives)

    @property
    def in_flight_s(self) -> float:
        """Seconds during which at least one collective was in flight."""
        return self._times.in_flight_s

    @property
    def exposed_s(self) -> float:
        """Seconds for which the training thread was blocked on collectives."""
        return self._times.exposed_s

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank sent."""
        return self._times.bytes_sent


@dataclass(frozen=True)
class StepResult:
    """One training step, the same on every rank but for what it communicated, which is this rank's own.

    `loss` is the mean over micro-batches and data ranks, `grad_norm` the norm before clipping, `skipped` 1 when nothing
    was updated because a gradient was not finite, `stop_requested` above 0 when any rank asked for a stop; all are
    0-dim tensors. `grad_reduce` is None when there is nobody to reduce with, `param_gather` when no parameter is
    gathered from shards.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    learning_rate: float
    loss_scale: float | None
    skipped: torch.Tensor
    stop_requested: torch.Tensor
    grad_reduce: StepCommunication | None
    param_gather: StepCommunication | None
