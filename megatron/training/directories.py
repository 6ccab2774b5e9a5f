"""Directories a run will write to, tried before it starts: hours later is too late to learn that one cannot be."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from megatron.errors import ConfigError


def check_writable(directories: Mapping[str, str | None]) -> None:
    """Make each directory and write a file into it; the keys are the arguments that name them, None is left out.

    Raises ConfigError naming argument, directory and reason.
    """
    for argument, directory in directories.items():
        if directory is None:
            continue
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(f"{argument} {directory} cannot be written to: {error.strerror}") from error
