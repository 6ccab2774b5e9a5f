"""File operations that survive a crash: what returned is on disk, and a name shows either the old or the new content.

Every change the checkpoint code makes to a disk goes through these functions, so a test can stop the world between any
two of them.
"""

import os
import shutil
import zlib
from pathlib import Path

_READ_BYTES = 1 << 22


def write_file(path: Path, content: bytes) -> None:
    """Write and fsync `content`. The entry in the directory is durable only after `sync_directory(path.parent)`."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make entries created, renamed and removed in directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create `path` and its parents; the entry is durable on return."""
    path.mkdir(parents=True, exist_ok=True)
    sync_directory(path.parent)


def rename(source: Path, target: Path) -> None:
    """Atomically give `source` the name `target` in the same directory, replacing a file there; durable on return."""
    source.replace(target)
    sync_directory(target.parent)


def remove_tree(path: Path) -> None:
    """Remove directory `path` and all in it."""
    shutil.rmtree(path)


def checksum(content: bytes) -> str:
    """CRC-32 of `content` as `crc32:<8 hex digits>`: finds damage by chance, not by intent, at memory speed."""
    return _format_crc(zlib.crc32(content))


def file_checksum(path: Path) -> str:
    """`checksum` of the file's content, read in pieces of 4 MiB."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            crc = zlib.crc32(piece, crc)
    return _format_crc(crc)


def _format_crc(crc: int) -> str:
    return f"crc32:{crc:08x}"
