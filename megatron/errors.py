"""Errors that end a run, each with the exit status a launcher or scheduler acts on.

`deepy.py` and `train.py` print a `UserError` as one message without a traceback; everything else is a fault and keeps
its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_USER_ERROR = 2
EXIT_RUN_AGAIN = 75
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class UserError(Exception):
    """Something the user can fix. The message names what is wrong, the numbers involved and what would be right."""

    exit_status = EXIT_USER_ERROR


class ConfigError(UserError):
    """A configuration that cannot work: unknown key, wrong type, impossible combination."""


class DataError(UserError):
    """An input that cannot be used: missing file, corrupted index, tokenizer that does not fit the data."""


class DivergenceError(UserError):
    """Training that went wrong in its numbers: a gradient that is not finite. Not a bad input, so not its status."""

    exit_status = EXIT_FAULT


class LostRankError(UserError):
    """A collective that never completed because a rank died or hangs. Not a bad input, so not its status."""

    exit_status = EXIT_FAULT


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read: missing, incomplete, or of another model."""


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Call the `main` of a program and exit with its status, None counting as 0.

    A `UserError` becomes one message on stderr and its exit status; any other exception keeps its traceback.
    """
    try:
        status = main() or EXIT_OK
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        status = error.exit_status
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        status = EXIT_INTERRUPTED
    sys.exit(status)
