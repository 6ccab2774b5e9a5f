"""`<log_dir>/exit.json`: how a run ended, for schedulers behind launchers that lose statuses."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_AGAIN, EXIT_USER_ERROR, UserError

_NAME = "exit.json"
_FAULT = 1


@dataclass(frozen=True)
class ExitRecord:
    """The exit status, why, after which iteration if known, and the signal that asked for it, if one did."""

    code: int
    reason: str
    iteration: int | None
    signal: str | None


def write_exit_record(log_dir: str | Path, record: ExitRecord) -> None:
    """Write `<log_dir>/exit.json`, whole or not at all."""
    directory = Path(log_dir)
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{_NAME}.tmp"
    temporary.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
    temporary.replace(directory / _NAME)


def read_exit_record(log_dir: str | Path) -> ExitRecord | None:
    """Return what `<log_dir>/exit.json` says, None if there is none that can be read."""
    try:
        return ExitRecord(**json.loads((Path(log_dir) / _NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def remove_exit_record(log_dir: str | Path | None) -> None:
    """Remove an earlier run's record, which would speak for this one until it ends."""
    if log_dir is not None:
        with contextlib.suppress(OSError):  # a folder that cannot be written to is reported by those who log there
            (Path(log_dir) / _NAME).unlink(missing_ok=True)


@contextlib.contextmanager
def failures_recorded(log_dir: str | Path | None, rank: int) -> Iterator[None]:
    """Around a run on all its ranks: rank 0 forgets an earlier run's record and writes one when an error ends it.

    The record of a run that ends well is the run's own to write.
    """
    if log_dir is None or rank != 0:
        yield
        return
    remove_exit_record(log_dir)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # the error itself matters more
            write_exit_record(log_dir, _record_of(error))
        raise


def settle_exit_record(log_dir: str | Path | None, status: int) -> None:
    """Make the record agree with the `status` of a run whose workers have all ended.

    Rank 0 may have been killed before it wrote, or not know how another rank ended.
    """
    if log_dir is None:
        return
    record = read_exit_record(log_dir)
    if record is None:
        record = ExitRecord(status, reason_for(status), None, _signal_name(status))
    elif record.code != status:
        reason = f"{reason_for(status)}; rank 0 said: {record.reason}"
        record = replace(record, code=status, reason=reason)
    else:
        return
    with contextlib.suppress(OSError):  # the status is still deepy's to hand on
        write_exit_record(log_dir, record)


def _record_of(error: BaseException) -> ExitRecord:
    if isinstance(error, UserError):
        return ExitRecord(error.exit_status, str(error), None, None)
    if isinstance(error, KeyboardInterrupt):
        return ExitRecord(EXIT_INTERRUPTED, "interrupted", None, signal.SIGINT.name)
    return ExitRecord(_FAULT, f"{type(error).__name__}: {error}", None, None)


def reason_for(status: int) -> str:
    """Say what a status that deepy returns means."""
    known = {
        EXIT_OK: "done",
        EXIT_USER_ERROR: "bad configuration or input",
        EXIT_RUN_AGAIN: "saved, to be run again",
    }
    ended_by = _signal_name(status)
    return known.get(status) or (f"a worker was ended by {ended_by}" if ended_by else "a worker failed")


def _signal_name(status: int) -> str | None:
    with contextlib.suppress(ValueError):
        return signal.Signals(status - 128).name
    return None
