"""Where records go: the interface of a sink, and several sinks as one."""

from collections.abc import Sequence
from contextlib import ExitStack

from megatron.monitor.record import TrainingRecord, ValidationRecord


class Sink:
    """A destination of metrics. Only rank 0 has sinks; a sink overrides what concerns it, the rest does nothing."""

    def step(self, iteration: int) -> None:
        """A step was launched. Called after every step, so it must not read anything from the device."""

    def training(self, record: TrainingRecord) -> None:
        """A log interval ended."""

    def validation(self, record: ValidationRecord) -> None:
        """An evaluation ended."""

    def close(self, *, failed: bool = False) -> None:
        """No more records will come; `failed` when an error ended the run. Everything is on disk when it returns."""


class Sinks(Sink):
    """Hands every record to each of `sinks`, in order. Empty on all ranks but 0."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = tuple(sinks)

    def step(self, iteration: int) -> None:
        """See `Sink.step`."""
        for sink in self.sinks:
            sink.step(iteration)

    def training(self, record: TrainingRecord) -> None:
        """See `Sink.training`."""
        for sink in self.sinks:
            sink.training(record)

    def validation(self, record: ValidationRecord) -> None:
        """See `Sink.validation`."""
        for sink in self.sinks:
            sink.validation(record)

    def close(self, *, failed: bool = False) -> None:
        """Close all sinks, last first, even if one of them raises."""
        with ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close, failed=failed)
