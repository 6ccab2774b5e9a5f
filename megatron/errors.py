"""Errors that end a run, each with the exit status a launcher or scheduler acts on.

`deepy.py` and `train.py` print a `UserError` as one message without a traceback; everything else is a fault and keeps
its traceback.
"""

EXIT_OK = 0
EXIT_USER_ERROR = 2
EXIT_RUN_AGAIN = 75


class UserError(Exception):
    """Something the user can fix. The message names what is wrong, the numbers involved and what would be right."""

    exit_status = EXIT_USER_ERROR


class ConfigError(UserError):
    """A configuration that cannot work: unknown key, wrong type, impossible combination."""


class DataError(UserError):
    """An input that cannot be used: missing file, corrupted index, tokenizer that does not fit the data."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read: missing, incomplete, or of another model."""
