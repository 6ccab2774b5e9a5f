"""Watch over a launcher process: signals reach its workers once, and nothing of it outlives deepy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*_ENDING, signal.SIGUSR2)
# The first asks the workers to save and end, the second interrupts them; the third takes no excuse.
_PATIENCE = 3

# Workers that are to hear of signals, given the launcher's process id; None while there are none yet.
FindWorkers = Callable[[int], "list[int] | None"]


@dataclass(frozen=True)
class Ended:
    """How a launcher ended: its status as subprocess gives it, and the first signal that deepy received meanwhile."""

    status: int
    received: signal.Signals | None


def supervise(command: Sequence[str], environment: Mapping[str, str], find_workers: FindWorkers) -> Ended:
    """Run a launcher to its end, passing signals on to its workers, and leave no process of its session behind.

    Signals go to the workers and not to the launcher, which would kill them; it ends when they have. While there are no
    workers, the launcher is ended. A hang-up of the terminal asks workers to end as SIGTERM does, unless it is ignored,
    as under nohup. When this process is killed outright, Linux ends the launcher, which ends its workers.
    """
    # In a session of its own, a Ctrl-C at the terminal reaches deepy alone.
    process = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_end_with_parent)
    relay = _Relay(process, find_workers)
    previous = {number: signal.getsignal(number) for number in _PASSED_ON}
    for number in _PASSED_ON:
        if not (number is signal.SIGHUP and previous[number] is signal.SIG_IGN):
            signal.signal(number, relay.pass_on)
    try:
        return Ended(process.wait(), relay.received)
    finally:
        _kill_session(process)
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Relay:
    """Passes signals on to the workers of a launcher."""

    def __init__(self, process: subprocess.Popen[bytes], find_workers: FindWorkers) -> None:
        self.received: signal.Signals | None = None
        self._num_ending = 0
        self._process = process
        self._find_workers = find_workers

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.received = self.received or signal.Signals(number)
        self._num_ending += number in _ENDING
        if self._num_ending >= _PATIENCE:
            _kill_session(self._process)
            return
        workers = self._find_workers(self._process.pid)
        if workers is None:
            self._process.terminate()
            return
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGTERM if number == signal.SIGHUP else number)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Ask Linux to send this process SIGTERM when its parent dies (prctl, PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
