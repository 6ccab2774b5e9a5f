"""How a run ended: what workers leave behind, and what deepy makes of it.

Launchers lose statuses (DeepSpeed's returns 0 when its child dies of a signal, torchrun turns all into 1), so each
worker of a deepy run writes its own into a folder that deepy made for this run, and rank 0 leaves `exit.json` for
schedulers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from megatron.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_AGAIN, EXIT_USER_ERROR, UserError

# Names the folder in which workers leave their statuses; set by deepy.
STATUS_FOLDER_VARIABLE = "NEOX_STATUS_FOLDER"
_FAULT = 1


@dataclass(frozen=True)
class ExitRecord:
    """`exit.json`: the status, why, after which iteration, and the signal that asked for it, if one did."""

    code: int
    reason: str
    iteration: int
    signal: str | None


def write_exit_record(log_dir: Path, record: ExitRecord) -> None:
    """Write `<log_dir>/exit.json`, whole or not at all."""
    log_dir.mkdir(parents=True, exist_ok=True)
    temporary = log_dir / ".exit.json.tmp"
    temporary.write_text(json.dumps(asdict(record)) + "\n")
    temporary.replace(log_dir / "exit.json")


def run_worker(main: Callable[[], int]) -> NoReturn:
    """Run a worker's `main` and exit with its status, leaving it for deepy.

    A UserError is one message without a traceback. Under deepy, a message that several ranks would print appears once.
    """
    status = _FAULT
    try:
        status = main()
    except UserError as error:
        status = error.exit_status
        if _is_first_to_say(str(error)):
            sys.stderr.write(f"error: {error}\n")
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
        sys.stderr.write("interrupted\n")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else EXIT_OK if ended.code is None else _FAULT
        raise
    finally:
        leave_status(status)
    sys.stdout.flush()
    sys.exit(status)


def status_of_run(folder: Path, num_workers: int, launcher_status: int) -> int:
    """Return the status of a run from what its `num_workers` workers left in `folder`.

    One worker's user error is everybody's: the launcher ends the others. A worker that left nothing died, which is a
    fault whatever the launcher says. 75 needs every worker's word.
    """
    statuses = [int(path.read_text()) for path in folder.glob("status_*")]
    if EXIT_USER_ERROR in statuses:
        return EXIT_USER_ERROR
    faults = [status for status in statuses if status not in (EXIT_OK, EXIT_RUN_AGAIN)]
    if faults:
        return faults[0]
    if len(statuses) < num_workers:
        return launcher_status if launcher_status > 0 and launcher_status != EXIT_RUN_AGAIN else _FAULT
    return EXIT_RUN_AGAIN if EXIT_RUN_AGAIN in statuses else EXIT_OK


def leave_status(status: int) -> None:
    """Leave this worker's status for deepy, before the worker ends: a launcher kills the others once one has ended."""
    folder = os.environ.get(STATUS_FOLDER_VARIABLE)
    if folder and Path(folder).is_dir():
        (Path(folder) / f"status_{os.environ.get('RANK', '0')}").write_text(str(status))


def _is_first_to_say(message: str) -> bool:
    """Whether no other worker of this deepy run has said this; outside of deepy, rank 0 speaks for all."""
    folder = os.environ.get(STATUS_FOLDER_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return True
    try:
        with (Path(folder) / f"said_{hash_of(message)}").open("x"):
            return True
    except FileExistsError:
        return False


def hash_of(message: str) -> str:
    """Return a file name's worth of a message: the same on all ranks, unlike Python's own hash."""
    import hashlib

    return hashlib.sha256(message.encode()).hexdigest()[:16]
