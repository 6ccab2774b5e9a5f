"""Which tokens make up sample i: documents in a shuffled order, cut into samples, in a shuffled order.

All documents of a split, once an epoch in an order of that epoch's own, form one stream of tokens over all epochs.
Sample k covers the tokens k * seq_length to (k + 1) * seq_length of the stream, both included: seq_length + 1 tokens,
the last of which is the first of sample k + 1, so that every token of the stream but the first is predicted exactly
once. This is how Megatron cuts samples (its `build_sample_idx`).

A sample belongs to the epoch in which it ends. Samples are shuffled within their epoch, never across: a run sees every
document once before it sees any twice, and a last epoch that is not used up is a random part of it. Epoch e is the same
whatever the number of epochs, so `train_iters` may grow between a stop and a resume: the samples before stay the same.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Streams of random numbers that must not coincide although they come from one seed.
_DOCUMENT_STREAM, _SAMPLE_STREAM = 1, 2


@dataclass(frozen=True)
class SampleIndex:
    """The cut of a split into samples.

    document_order: documents in the order of the stream, numbered from the first of the split, [num_epochs * documents]
    sample_starts: for each sample its first token, as (position in document_order, offset in that document), and one
        row more for the last token of the last sample, [num_samples + 1, 2]
    sample_order: the samples in the order they are trained on, [num_samples]
    """

    document_order: NDArray[Any]
    sample_starts: NDArray[Any]
    sample_order: NDArray[Any]

    @property
    def num_samples(self) -> int:
        """Samples in all epochs together."""
        return self.sample_order.size


def samples_in_epochs(num_epochs: int, num_tokens: int, seq_length: int) -> int:
    """Whole samples in `num_epochs` passes over `num_tokens` tokens (one token more than seq_length in each)."""
    return max(num_epochs * num_tokens - 1, 0) // seq_length


def epochs_for_samples(num_samples: int, num_tokens: int, seq_length: int) -> int:
    """The fewest passes over `num_tokens` > 0 tokens that hold `num_samples` samples; at least 1."""
    return max(1, -(-(num_samples * seq_length + 1) // num_tokens))


def build_sample_index(document_lengths: NDArray[Any], *, seq_length: int, num_epochs: int, seed: int) -> SampleIndex:
    """Shuffle documents, cut samples, shuffle samples; vectorised, a few seconds for 20 M documents.

    `document_lengths` (tokens, [documents]) may contain zeros but not only zeros. The result depends on the arguments
    alone, not on the version of numpy: `RandomState` is frozen by numpy's compatibility policy, `Generator` is not.
    """
    document_order = _document_order(len(document_lengths), num_epochs, _random_state(seed, _DOCUMENT_STREAM))
    num_tokens = int(document_lengths.sum(dtype=np.int64))
    num_samples = samples_in_epochs(num_epochs, num_tokens, seq_length)
    sample_starts = _sample_starts(document_lengths[document_order], num_samples, seq_length)
    epoch_ends = [samples_in_epochs(epoch + 1, num_tokens, seq_length) for epoch in range(num_epochs)]
    sample_order = _sample_order(epoch_ends, _random_state(seed, _SAMPLE_STREAM))
    return SampleIndex(document_order, sample_starts, sample_order)


def _random_state(seed: int, stream: int) -> np.random.RandomState:
    return np.random.RandomState([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, stream])


def _smallest_integer(largest: int) -> type[np.signedinteger]:
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


def _document_order(num_documents: int, num_epochs: int, random: np.random.RandomState) -> NDArray[Any]:
    """Every epoch a permutation of its own. Drawn epoch by epoch, so that more epochs do not change the first ones."""
    one_epoch = np.arange(num_documents, dtype=_smallest_integer(num_documents))
    order = np.tile(one_epoch, (num_epochs, 1))
    if num_documents > 1:
        for row in order:
            random.shuffle(row)
    return order.reshape(-1)


def _sample_starts(stream_lengths: NDArray[Any], num_samples: int, seq_length: int) -> NDArray[Any]:
    """Locate tokens 0, seq_length, 2 * seq_length, ... of the stream of documents with these lengths."""
    ends = np.cumsum(stream_lengths, dtype=np.int64)
    tokens = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    # The first document that ends behind the token: an empty one ends where it starts and is never found.
    positions = np.searchsorted(ends, tokens, side="right")
    offsets = tokens - (ends[positions] - stream_lengths[positions])
    largest = max(len(stream_lengths), int(stream_lengths.max()))
    starts = np.empty((num_samples + 1, 2), dtype=_smallest_integer(largest))
    starts[:, 0] = positions
    starts[:, 1] = offsets
    return starts


def _sample_order(epoch_ends: list[int], random: np.random.RandomState) -> NDArray[Any]:
    order = np.arange(epoch_ends[-1], dtype=_smallest_integer(epoch_ends[-1]))
    start = 0
    for end in epoch_ends:
        if end - start > 1:
            random.shuffle(order[start:end])
        start = end
    return order
