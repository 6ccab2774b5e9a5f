"""Reader of Megatron's memory-mapped token files (`indexed_format` describes them)."""

import mmap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_format import HEADER_BYTES, IndexHeader, clean_prefix, index_path, read_header, tokens_path
from megatron.errors import DataError

# Checks and warm-up go through the files in pieces of this many entries or bytes, so that they need no memory.
_CHECK_ENTRIES = 1 << 20
_WARM_UP_BYTES = 1 << 24


class IndexedDataset:
    """Sequences of token ids in `<prefix>.bin`, located by `<prefix>.idx`; documents are runs of sequences.

    Opening reads the header and compares sizes only (microseconds, whatever the size of the data); the files are mapped
    at first use, once a process, so that an instance may be pickled to data workers. Raises `DataError` where the pair
    of files cannot be a data set.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = clean_prefix(prefix)
        self.header: IndexHeader = read_header(self.prefix)
        self._check_ends()

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "header": self.header}

    def __len__(self) -> int:
        """Number of sequences."""
        return self.header.num_sequences

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        """The tokens of one sequence: a read-only view into the file, in the file's own integer type."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)}")
        start = int(self.sequence_pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sequence_lengths[sequence])]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[i] for i in range(len(self)))

    @property
    def dtype(self) -> np.dtype:
        """The integer type of the tokens in the file."""
        return self.header.dtype

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return self.header.num_boundaries - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self.tokens.size

    @cached_property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens in each sequence, int32 [num_sequences], mapped."""
        return self._map_index(0, len(self), np.dtype("<i4"))

    @cached_property
    def sequence_pointers(self) -> NDArray[np.int64]:
        """First byte of each sequence in .bin, int64 [num_sequences], mapped."""
        return self._map_index(4 * len(self), len(self), np.dtype("<i8"))

    @cached_property
    def document_indices(self) -> NDArray[np.int64]:
        """First sequence of each document and, last, the number of sequences: int64 [num_documents + 1], mapped."""
        return self._map_index(12 * len(self), self.header.num_boundaries, np.dtype("<i8"))

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """All tokens of the file in a row, [num_tokens], mapped."""
        return map_file(tokens_path(self.prefix), random_access=True).view(self.dtype)

    def documents(self, first: int, last: int) -> NDArray[Any]:
        """The tokens of the documents `first` .. `last - 1` in a row: a read-only view into the file."""
        start, stop = int(self.document_indices[first]), int(self.document_indices[last])
        if start == stop:
            return self.tokens[:0]
        width = self.dtype.itemsize
        end = int(self.sequence_pointers[stop - 1]) // width + int(self.sequence_lengths[stop - 1])
        return self.tokens[int(self.sequence_pointers[start]) // width : end]

    def document_lengths(self, first: int, last: int) -> NDArray[Any]:
        """Tokens in each of the documents `first` .. `last - 1`, [last - first]."""
        sequences = self.document_indices[first : last + 1]
        lengths = self.sequence_lengths[sequences[0] : sequences[-1]]
        steps = (np.diff(piece) for piece in _overlapping_pieces(sequences))
        if all((step == 1).all() for step in steps):  # a sequence each, as nearly always
            return np.require(lengths, requirements="A")  # they are at an odd address in the file, slow to gather from
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        return np.diff(ends[sequences - sequences[0]])

    def warm_up(self) -> None:
        """Read both files once from end to end, so that later reads find them in the page cache."""
        for path in (index_path(self.prefix), tokens_path(self.prefix)):
            with path.open("rb", buffering=0) as file:
                while file.read(_WARM_UP_BYTES):
                    pass

    def check_contents(self) -> None:
        """Check every entry of the index, not only its ends. Takes about 6 ms a million sequences.

        Raises `DataError` where a length is negative, a sequence does not start where the one before it ends, or
        documents overlap.
        """
        lengths, pointers, documents = self.sequence_lengths, self.sequence_pointers, self.document_indices
        for start in range(0, len(self), _CHECK_ENTRIES):
            stop = min(start + _CHECK_ENTRIES, len(self))
            if (lengths[start:stop] < 0).any():
                bad = start + int(np.argmax(lengths[start:stop] < 0))
                raise DataError(f"{self._idx} is corrupted: sequence {bad} has {lengths[bad]} tokens")
            ends = pointers[start:stop] + lengths[start:stop].astype(np.int64) * self.dtype.itemsize
            wrong = pointers[start + 1 : stop + 1] != ends[: len(self) - 1 - start]
            if wrong.any():
                bad = start + 1 + int(np.argmax(wrong))
                before = f"the one before it ends at byte {ends[bad - 1 - start]}"
                raise DataError(f"{self._idx} is corrupted: sequence {bad} starts at byte {pointers[bad]}, {before}")
        for number, piece in enumerate(_overlapping_pieces(documents)):
            falls = np.diff(piece) < 0
            if falls.any():
                bad = number * _CHECK_ENTRIES + int(np.argmax(falls))
                raise DataError(f"{self._idx} is corrupted: document {bad} ends before it starts")

    @property
    def _idx(self) -> Path:
        return index_path(self.prefix)

    def _check_ends(self) -> None:
        documents = self.document_indices
        if documents[0] != 0 or documents[-1] != len(self):
            ends = f"from {documents[0]} to {documents[-1]}"
            raise DataError(f"{self._idx} is corrupted: documents run {ends}, expected 0 to {len(self)} sequences")
        expected = 0
        if len(self):
            expected = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        size = tokens_path(self.prefix).stat().st_size
        if size % self.dtype.itemsize:
            raise DataError(f"{tokens_path(self.prefix)} has {size} bytes, no whole number of {self.dtype} tokens")
        if size != expected:
            relation = "shorter" if size < expected else "longer"
            raise DataError(
                f"{tokens_path(self.prefix)} is {relation} than {self._idx} says: {size} bytes, expected {expected}. "
                "The file was cut off or belongs to another index"
            )

    def _map_index(self, offset: int, count: int, dtype: np.dtype) -> NDArray[Any]:
        start = HEADER_BYTES + offset
        return map_file(self._idx)[start : start + count * dtype.itemsize].view(dtype)


def _overlapping_pieces(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Pieces that share one value with the next, so that differences of neighbours are all in one of them."""
    return (values[start : start + _CHECK_ENTRIES + 1] for start in range(0, len(values) - 1, _CHECK_ENTRIES))


def map_file(path: Path, *, random_access: bool = False) -> NDArray[np.uint8]:
    """The bytes of a file, mapped read-only.

    `random_access`: shuffled samples touch a few KB here and there, and reading ahead of each wastes most of what is
    read; on a cold file of 4 GB we measured 4.8 ms a document with the kernel's read-ahead and 0.09 ms without.
    """
    if not path.stat().st_size:
        return np.zeros(0, dtype=np.uint8)  # a file without bytes cannot be mapped
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if random_access and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype=np.uint8)
