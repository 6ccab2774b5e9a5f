"""How long communication was in flight, and how much of that the training thread had to wait for.

Marks are taken while the step runs and never block; they are turned into seconds when somebody reads them, outside the
step. On a CPU a mark is a clock reading; on an accelerator it is an event on a stream, so that nothing synchronises.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.distributed as dist


class Mark(Protocol):
    """A point in time that may not have been reached yet."""

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds from `earlier`, a mark of the same clock, to this one. Both must have been reached."""
        ...

    def no_later_than(self, bound: Mark) -> None:
        """Note that this point had been reached by `bound`, in case nobody was told when it was."""
        ...


class Clock(Protocol):
    """Takes marks in the order in which the work of a step happens."""

    def mark(self) -> Mark:
        """Mark the present point of the training thread or stream."""
        ...

    def mark_landing(self, work: dist.Work) -> Mark:
        """Mark the completion of `work` without waiting for it here."""
        ...


class HostMark:
    """A reading of the host's clock, filled in later for a landing."""

    def __init__(self, at_s: float | None = None) -> None:
        self.at_s = at_s

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds from `earlier` to this mark."""
        assert isinstance(earlier, HostMark) and earlier.at_s is not None and self.at_s is not None
        return self.at_s - earlier.at_s

    def no_later_than(self, bound: Mark) -> None:
        """Take `bound` for this mark where the backend's thread has not got round to reading the clock."""
        assert isinstance(bound, HostMark)
        if self.at_s is None:
            self.at_s = bound.at_s


class HostClock:
    """For devices whose collectives the host itself waits for."""

    def mark(self) -> HostMark:
        """Read the clock."""
        return HostMark(time.perf_counter())

    def mark_landing(self, work: dist.Work) -> HostMark:
        """Have the backend's thread read the clock when the collective completes."""
        landing = HostMark()

        def landed(_: torch.futures.Future) -> None:
            landing.no_later_than(HostMark(time.perf_counter()))

        work.get_future().add_done_callback(landed)
        return landing


class EventMark:
    """An event on one of the device's streams."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds from `earlier` to this mark on the device's clock. Waits for this event alone, not for the device."""
        assert isinstance(earlier, EventMark)
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000.0

    def no_later_than(self, bound: Mark) -> None:
        """Do nothing: an event is always told."""


class EventClock:
    """For accelerators: collectives run on streams of their own, and only a stream waits for another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._landing_stream = torch.Stream(device=device)

    def mark(self) -> EventMark:
        """Record an event on the current stream."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return EventMark(event)

    def mark_landing(self, work: dist.Work) -> EventMark:
        """Let a stream that does nothing else wait for the collective, and record an event behind it."""
        event = torch.Event(self._device, enable_timing=True)
        with self._landing_stream:
            work.wait()
            event.record(self._landing_stream)
        return EventMark(event)


def clock_for(device: torch.device) -> Clock:
    """Return the clock that measures collectives on `device`."""
    return HostClock() if device.type == "cpu" else EventClock(device)


CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass
class CollectiveTimes:
    """The moments of one collective of one bucket, and the spans in which the training thread was blocked on it.

    `ready` is when its input was complete, None where that was not noted. `bytes_sent` is what this rank sends.
    """

    bucket: int
    kind: CollectiveKind
    bytes_sent: int
    launched: Mark
    landed: Mark
    ready: Mark | None = None
    blocked: list[tuple[Mark, Mark]] = field(default_factory=list)


@dataclass(frozen=True)
class CommunicationTimes:
    """Communication of one step on one rank.

    `in_flight_s` is the time during which at least one collective was in flight, `exposed_s` the part of it during
    which the training thread was blocked, launches included; the rest was hidden behind computation. `bytes_sent` is
    what this rank sent.
    """

    in_flight_s: float
    exposed_s: float
    bytes_sent: int


def summarise(collectives: Sequence[CollectiveTimes]) -> CommunicationTimes:
    """Turn the marks of one step into seconds. Call it after the step, when all of them have been reached."""
    if not collectives:
        return CommunicationTimes(0.0, 0.0, 0)
    origin = collectives[0].launched
    flights = [(times.launched.seconds_since(origin), times.landed.seconds_since(origin)) for times in collectives]
    exposed_s = sum(end.seconds_since(start) for times in collectives for start, end in times.blocked)
    return CommunicationTimes(_covered(flights), exposed_s, sum(times.bytes_sent for times in collectives))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans: two collectives in flight at once count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
