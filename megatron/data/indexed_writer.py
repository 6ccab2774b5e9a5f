"""Writer of Megatron's memory-mapped token files: streams tokens out, publishes both files when all is there."""

import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.atomic_file import AtomicFile
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_format import IndexHeader, code_of_dtype, index_path, tokens_path
from megatron.errors import DataError

_COPY_BYTES = 1 << 22


class IndexedDatasetWriter:
    """Writes `<prefix>.bin` and `<prefix>.idx`, byte for byte as megatron-core's builder does.

    Use as a context manager: leaving it normally publishes the files, an exception discards them. Until then everything
    goes to temporary names in the same directory, so that no reader, and no later run, sees half a data set. Holds
    4 bytes a sequence and 8 a document in memory.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type[np.integer]) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        code_of_dtype(self.dtype)
        limits = np.iinfo(self.dtype)
        self._min_id, self._max_id = max(0, int(limits.min)), int(limits.max)
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._tokens = _open(tokens_path(prefix))

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finalize()
        else:
            self.discard()

    @property
    def num_documents(self) -> int:
        """Documents ended so far."""
        return len(self._boundaries) - 1

    def add_sequence(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append one sequence to the document being written.

        Raises `DataError` when an id does not fit the token type: ids never wrap.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise DataError(f"a sequence is a row of integer token ids, got {ids.dtype} of shape {ids.shape}")
        if ids.size:
            low, high = int(ids.min()), int(ids.max())
            if low < self._min_id or high > self._max_id:
                bad = low if low < self._min_id else high
                raise DataError(f"token id {bad} does not fit {self.dtype} (0 to {self._max_id}) of '{self.prefix}'")
        self._tokens.file.write(ids.astype(self.dtype).tobytes())
        self._lengths.append(ids.size)

    def end_document(self) -> None:
        """End the document: the next sequence starts another one."""
        self._boundaries.append(len(self._lengths))

    def add_document(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append a document that is one sequence; it may be empty."""
        self.add_sequence(tokens)
        self.end_document()

    def add_dataset(self, prefix: str | Path) -> None:
        """Append all sequences and documents of an existing data set of the same token type. Raises `DataError`."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(f"'{other.prefix}' stores {other.dtype}, '{self.prefix}' {self.dtype}: types must be equal")
        other.check_contents()
        first = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.astype(np.int32).tobytes())
        self._boundaries.frombytes((other.document_indices[1:] + first).astype(np.int64).tobytes())
        with tokens_path(other.prefix).open("rb") as source:
            shutil.copyfileobj(source, self._tokens.file, _COPY_BYTES)

    def finalize(self) -> None:
        """Write the index and publish both files under their final names.

        An index from before is removed first: at no instant does an old index stand next to new tokens.
        """
        index = _open(index_path(self.prefix))
        try:
            self._tokens.close()
            self._write_index(index)
            index.close()
            index_path(self.prefix).unlink(missing_ok=True)
            self._tokens.publish()
            index.publish()
        finally:
            index.discard()
            self.discard()

    def discard(self) -> None:
        """Drop what was written; files from before under the final names stay as they are."""
        self._tokens.discard()

    def _write_index(self, index: AtomicFile) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
        index.file.write(IndexHeader(self.dtype, len(lengths), len(self._boundaries)).to_bytes())
        index.file.write(lengths.astype("<i4").tobytes())
        index.file.write(pointers.astype("<i8").tobytes())
        index.file.write(np.asarray(self._boundaries, dtype="<i8").tobytes())


def merge_datasets(sources: Sequence[str | Path], prefix: str | Path) -> None:
    """Concatenate the data sets at `sources`, in that order, into one at `prefix`. Raises `DataError`."""
    if not sources:
        raise DataError(f"no data sets to merge into '{prefix}'")
    with IndexedDatasetWriter(prefix, IndexedDataset(sources[0]).dtype) as writer:
        for source in sources:
            writer.add_dataset(source)


def _open(path: Path) -> AtomicFile:
    try:
        return AtomicFile(path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
