"""Samples of seq_length + 1 tokens for a language model, cut from the documents of one indexed data set."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.index_cache import IndexRequest, open_index
from megatron.data.sample_index import SampleIndex


class TokenDataset(Protocol):
    """What the loader reads: item i is an int64 array [seq_length + 1]."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        """The tokens of one sample."""


class GPTDataset:
    """The first `num_samples` samples of a sample index, as token arrays; documents follow each other without padding.

    The index is opened at first use and again in every process the data set is pickled to.
    """

    def __init__(self, request: IndexRequest, num_samples: int) -> None:
        self.request = request
        self.num_samples = num_samples
        self._index: SampleIndex | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        """Tokens of sample `sample` in training order, int64 [seq_length + 1]. Raises `IndexError` behind the end."""
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of {self.num_samples}")
        cut = int(self.index.sample_order[sample])
        (first, start), (last, end) = self.index.sample_starts[cut : cut + 2].tolist()
        tokens = np.empty(self.request.seq_length + 1, dtype=np.int64)
        dataset, first_document = self.request.dataset, self.request.first_document
        filled = 0
        for position, document in enumerate(self.index.document_order[first : last + 1].tolist(), first):
            document += first_document
            piece = dataset.documents(document, document + 1)[start : end + 1 if position == last else None]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            start = 0
        return tokens

    def open(self) -> None:
        """Open the index now rather than at the first sample. Raises `DataError` where the data is corrupted."""
        self._index = open_index(self.request)

    @property
    def index(self) -> SampleIndex:
        """The cut into samples, mapped from the cache."""
        if self._index is None:
            self.open()
        assert self._index is not None
        return self._index
