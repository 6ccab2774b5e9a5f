"""A file that appears under its name only when it is whole."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron.errors import DataError


class AtomicFile:
    """A binary file written to a temporary name in the target's directory and renamed by `publish`.

    Two processes may write the same target at once: each has its own temporary name and the last rename wins. A process
    that is killed leaves a file `.<name>.<random>.tmp` that nothing reads. Raises `OSError` where the directory cannot
    be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary_path = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.temporary_path.open("xb")

    def close(self) -> None:
        """Close once all bytes are on the disk, still under the temporary name."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def publish(self) -> None:
        """Give the file its name, replacing what had it."""
        if not self.file.closed:
            self.close()
        self.temporary_path.replace(self.path)

    def discard(self) -> None:
        """Remove the temporary file, if it still is there; what stands under the name stays."""
        self.file.close()
        self.temporary_path.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write that appears under `path` when the block ends, and not at all when it raises.

    Raises `DataError` where the directory cannot be made or written to.
    """
    try:
        pending = AtomicFile(path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield pending.file
        pending.publish()
    finally:
        pending.discard()
