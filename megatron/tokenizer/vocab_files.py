"""Checks of vocabulary files that come before any library sees them, so that messages name the file."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from megatron.errors import DataError


def checked_file(path: str | Path, expected: str) -> Path:
    """Return the path of a readable file that is not empty; `expected` says what it ought to be.

    Raises DataError, naming the file and what is expected.
    """
    file = Path(path)
    if file.is_dir():
        raise DataError(f"'{file}' is a folder; expected {expected}")
    if not file.exists():
        raise DataError(f"vocabulary file '{file}' does not exist; expected {expected} (nothing is downloaded)")
    try:
        with file.open("rb") as stream:
            empty = not stream.read(1)
    except OSError as error:
        raise DataError(f"vocabulary file '{file}' cannot be read: {error.strerror}") from error
    if empty:
        raise DataError(f"vocabulary file '{file}' is empty (0 bytes); expected {expected}")
    return file


def refuse_malformed(path: str | Path, expected: str, error: Exception) -> NoReturn:
    """Raise the DataError for a file that a library could not make sense of."""
    raise DataError(f"vocabulary file '{path}' is not {expected}: {error}") from error


def refuse_without_eod(path: str | Path, tried: tuple[str, ...]) -> NoReturn:
    """Raise the DataError for a vocabulary in which no document can be ended."""
    raise DataError(f"the vocabulary in '{path}' has no end-of-document token; expected one of {', '.join(tried)}")
