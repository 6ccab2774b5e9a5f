"""Signals that ask for an orderly stop: at a step boundary, agreed between ranks, after saving."""

from __future__ import annotations

import logging
import signal
from types import FrameType, TracebackType

_log = logging.getLogger(__name__)

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


class StopSignals:
    """Turns the first SIGINT, SIGTERM or SIGUSR2 into a flag while it is entered; a second SIGINT interrupts at once.

    Schedulers send SIGTERM or SIGUSR2 to one rank or to all; the flag travels with the loss (`train_batch`), so that
    one is enough.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    @property
    def stop_requested(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self.received is not None

    def __enter__(self) -> StopSignals:
        for number in _STOPPING:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        _log.info("received %s: stopping after the step under way", self.received.name)
