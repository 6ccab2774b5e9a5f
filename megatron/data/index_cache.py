"""Sample indices kept on disk: built by one rank, mapped by all, rebuilt when anything they depend on changes.

A file holds the three arrays of one `SampleIndex` in the safetensors layout (a JSON header, then the arrays), so any
safetensors reader can look inside. Its name carries a hash of everything the index depends on; that same description
is in the header. It is written under a temporary name and renamed, so a file under the final name is whole; against a
file damaged later there are its size, checked by every rank, and a checksum, checked by the builder.
"""

import hashlib
import json
import logging
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.atomic_file import AtomicFile
from megatron.data.indexed_dataset import IndexedDataset, map_file
from megatron.data.indexed_format import index_path, tokens_path
from megatron.data.sample_index import SampleIndex, build_sample_index

logger = logging.getLogger(__name__)

# Part of every key: raise it when the meaning of a cached index changes.
_CACHE_VERSION = 1
_DTYPES: dict[str, np.dtype] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_EDGE_BYTES = 1 << 16


@dataclass(frozen=True)
class IndexRequest:
    """A sample index over the documents `first_document` .. `last_document - 1` of one data set."""

    dataset: IndexedDataset
    first_document: int
    last_document: int
    seq_length: int
    num_epochs: int
    seed: int

    def description(self) -> dict[str, Any]:
        """Everything the index depends on, for the key and for whoever looks into the file.

        The data set is recognised by the sizes of its files, the time its index was written and both ends of it, not
        by its path: moving the directory keeps the cache, preprocessing again does not.
        """
        index = index_path(self.dataset.prefix)
        stat = index.stat()
        with index.open("rb") as file:
            edges = file.read(_EDGE_BYTES)
            file.seek(max(0, stat.st_size - _EDGE_BYTES))
            edges += file.read(_EDGE_BYTES)
        return {
            "documents": [self.first_document, self.last_document],
            "seq_length": self.seq_length,
            "num_epochs": self.num_epochs,
            "seed": self.seed,
            "cache_version": _CACHE_VERSION,
            "idx_bytes": stat.st_size,
            "idx_mtime_ns": stat.st_mtime_ns,
            "idx_edges": hashlib.sha256(edges).hexdigest(),
            "bin_bytes": tokens_path(self.dataset.prefix).stat().st_size,
        }

    def cache_path(self) -> Path:
        """Where the index is kept: in a directory next to the data that may be deleted at any time."""
        key = hashlib.sha256(json.dumps(self.description(), sort_keys=True).encode()).hexdigest()[:20]
        prefix = Path(self.dataset.prefix)
        return prefix.parent / "index-cache" / f"{prefix.name}-{key}.safetensors"

    def build(self) -> SampleIndex:
        """Compute the index. Raises `DataError` where the data set's own index is corrupted."""
        self.dataset.check_contents()
        lengths = self.dataset.document_lengths(self.first_document, self.last_document)
        return build_sample_index(lengths, seq_length=self.seq_length, num_epochs=self.num_epochs, seed=self.seed)


class _UnusableFileError(Exception):
    """A cache file that is not whole."""


def ensure_cached(request: IndexRequest) -> None:
    """Leave a whole cache file behind, if the directory can be written; what is there already and whole is kept.

    For the building rank. Any number of processes may do so at once. Never fails for want of a place to write:
    `open_index` then builds in memory, and a warning says so here. Raises `DataError` for corrupted data.
    """
    path = request.cache_path()
    try:
        _load(path, verify_checksum=True)
        return
    except FileNotFoundError:
        pass
    except (OSError, _UnusableFileError) as error:
        logger.warning("sample index %s is unusable (%s); building it again", path, error)
    index = request.build()
    try:
        _store(path, index, request.description())
    except OSError as error:
        reason = error.strerror or error
        logger.warning("cannot keep the sample index in %s (%s): every process builds its own", path.parent, reason)


def open_index(request: IndexRequest) -> SampleIndex:
    """The cached index, mapped; built in memory where there is none (a directory that cannot be written, a network
    file system that does not show the file yet): it depends on the request alone, so all ranks hold the same one.
    """
    try:
        return _load(request.cache_path(), verify_checksum=False)
    except (OSError, _UnusableFileError):
        return request.build()


def _store(path: Path, index: SampleIndex, description: Mapping[str, Any]) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in _arrays(index).items()}
    file = AtomicFile(path)
    try:
        file.file.write(_header(arrays, description))
        for array in arrays.values():
            file.file.write(array.data)
        file.publish()
    finally:
        file.discard()


def _arrays(index: SampleIndex) -> dict[str, NDArray[Any]]:
    """The arrays, widest type first: safetensors files are aligned that way."""
    named = {name: getattr(index, name) for name in (field.name for field in fields(SampleIndex))}
    return dict(sorted(named.items(), key=lambda item: -item[1].itemsize))


def _header(arrays: Mapping[str, NDArray[Any]], description: Mapping[str, Any]) -> bytes:
    names = {dtype: name for name, dtype in _DTYPES.items()}
    checksum = _checksum(arrays.values())
    header: dict[str, Any] = {"__metadata__": {"crc32": str(checksum), "built_for": json.dumps(description)}}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _checksum(arrays: Iterable[NDArray[Any]]) -> int:
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, checksum)
    return checksum


def _load(path: Path, *, verify_checksum: bool) -> SampleIndex:
    """Map a cache file. Raises `FileNotFoundError`, or `_UnusableFileError` for one that is not whole."""
    raw = map_file(path)
    header_bytes = struct.unpack("<Q", raw[:8].tobytes())[0] if raw.size >= 8 else 0
    if not 2 <= header_bytes <= raw.size - 8:
        raise _UnusableFileError(f"{raw.size} bytes, no header")
    try:
        header = json.loads(raw[8 : 8 + header_bytes].tobytes())
        checksum = int(header.pop("__metadata__")["crc32"])
        arrays = {name: _array(raw[8 + header_bytes :], entry) for name, entry in header.items()}
        index = SampleIndex(**arrays)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _UnusableFileError(f"cut off or not a sample index: {error}") from error
    if verify_checksum and _checksum(arrays.values()) != checksum:
        raise _UnusableFileError("its checksum does not match")
    return index


def _array(raw: NDArray[np.uint8], entry: Mapping[str, Any]) -> NDArray[Any]:
    start, end = entry["data_offsets"]
    array: NDArray[Any] = raw[start:end].view(_DTYPES[entry["dtype"]])
    return array.reshape(entry["shape"])
