"""How workers end, and what deepy makes of it.

DeepSpeed's launcher hands on the status of whichever worker it noticed first, and mangles one that a signal ended. So
each worker of a deepy run leaves its own status in a folder that deepy made for the run.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil

from megatron.errors import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_AGAIN, EXIT_USER_ERROR, UserError
from megatron.launch.environment import started_by_one_launcher

# Names the folder in which workers leave their statuses; set by deepy.
STATUS_FOLDER_VARIABLE = "NEOX_STATUS_FOLDER"
FAULT = EXIT_FAULT
# How long a worker whose collective failed waits for another one to say why it left.
_EXPLANATION_S = 2.0


def run_worker(main: Callable[[], int]) -> NoReturn:
    """Run a worker's `main` and exit with its status, leaving it for deepy.

    A UserError is one message without a traceback; one that several workers of a host meet is printed by the first.
    """
    status = FAULT
    try:
        status = main()
    except UserError as error:
        status = error.exit_status
        _say_once(f"error: {error}")
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
        _say_once("interrupted")
    except RuntimeError:
        if not _another_worker_explains():
            raise
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else EXIT_OK if ended.code is None else FAULT
        raise
    finally:
        leave_status(status)
    sys.stdout.flush()
    sys.exit(status)


def status_of_run(folder: Path, num_workers: int, launcher_status: int, received: signal.Signals | None = None) -> int:
    """Return the status of a run from what its `num_workers` workers left in `folder`, 128 + n for a signal n.

    `launcher_status` is as subprocess gives it; `received` is the signal by which deepy was asked to end. One worker's
    user error is everybody's: the others fail for want of it, or the launcher ends them. 0 and 75 need every worker's
    word: one that left nothing died, which is a fault whatever the launcher says.
    """
    left = [int(path.read_text()) for path in sorted(folder.glob("status_*"))]
    faults = [status for status in left if status not in (EXIT_OK, EXIT_USER_ERROR, EXIT_RUN_AGAIN)]
    if EXIT_USER_ERROR in left:
        return EXIT_USER_ERROR
    if faults:
        return faults[0]
    if len(left) == num_workers:
        return EXIT_RUN_AGAIN if EXIT_RUN_AGAIN in left else EXIT_OK
    if received is not None:
        return 128 + received
    launched = shell_status(launcher_status)
    return FAULT if launched in (EXIT_OK, EXIT_RUN_AGAIN) else launched


def shell_status(status: int) -> int:
    """Return a subprocess's status as shells give it: 128 + n for a process that signal n ended.

    DeepSpeed's launcher exits with its worker's -n, of which the system keeps 256 - n.
    """
    if status < 0:
        return 128 - status
    return 128 + 256 - status if 256 - 64 <= status < 256 else status


def leave_status(status: int) -> None:
    """Leave this worker's status for deepy, before the worker ends: a launcher ends the others once one has ended."""
    folder = _status_folder()
    if folder is not None:
        path = folder / f"status_{os.environ.get('RANK', '0')}"
        unfinished = path.with_name(f".{path.name}")
        unfinished.write_text(str(status))
        unfinished.replace(path)


def _another_worker_explains() -> bool:
    """Whether another worker of this deepy run says why it ended.

    A collective fails when a rank has gone, a moment before that rank's message is out; only the message is of use.
    """
    folder = _status_folder()
    give_up_s = time.monotonic() + _EXPLANATION_S
    while folder is not None and time.monotonic() < give_up_s:
        if any(folder.glob("said_*")):
            return True
        time.sleep(0.05)
    return False


def _status_folder() -> Path | None:
    folder = os.environ.get(STATUS_FOLDER_VARIABLE)
    return Path(folder) if folder and Path(folder).is_dir() else None


def _say_once(message: str) -> None:
    """Print to stderr unless another worker of this launch on this host already has.

    Every worker meets most errors, some meet one alone, and a launcher ends the others once the first is gone: so no
    fixed rank can speak for all. The first to make the message's file does.
    """
    digest = hashlib.sha256(message.encode("utf-8", "backslashreplace")).hexdigest()[:16]
    folder = _status_folder()
    if folder is None and not started_by_one_launcher():
        sys.stderr.write(message + "\n")
        return
    marker = folder / f"said_{digest}" if folder is not None else _marker_of_siblings(digest)
    try:
        marker.open("x").close()
    except FileExistsError:
        return
    except OSError:  # better twice than never
        pass
    sys.stderr.write(message + "\n")


def _marker_of_siblings(digest: str) -> Path:
    """A file that all processes name alike which the same launcher process started, and nobody else."""
    parent = psutil.Process(os.getppid())
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"neox-said-{os.getuid()}-{parent.pid}-{parent.create_time():.0f}-{restart}-{digest}"
    return Path(tempfile.gettempdir()) / name
