"""Documents to token ids, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.errors import DataError
from megatron.tokenizer import Tokenizer, build_tokenizer
from tools.datasets.documents import RawDocument, texts_of

# Large enough that handing a batch to a worker costs nothing, small enough that few of them fill no memory.
BATCH_BYTES = 1 << 18
# Batches in flight for a worker: one being encoded, one waiting, one done and not yet written.
BATCHES_PER_WORKER = 3


@dataclass(frozen=True)
class EncodeSettings:
    """What a process needs to encode documents: the arguments of `build_tokenizer` and what to encode."""

    tokenizer_type: str
    vocab_file: str | None
    merge_file: str | None
    keys: tuple[str, ...]
    append_eod: bool

    def build(self) -> Tokenizer:
        """Return the tokenizer. Raises as `build_tokenizer` does."""
        return build_tokenizer(self.tokenizer_type, self.vocab_file, self.merge_file)


@dataclass(frozen=True)
class EncodedColumn:
    """The documents of a batch under one key, end of document included where asked for."""

    ids: NDArray[np.int32]  # of all documents, one after the other
    lengths: list[int]
    num_skipped: int  # documents without text


@dataclass(frozen=True)
class EncodedBatch:
    """A batch of documents, one column a key, and the bytes it had in its file."""

    columns: tuple[EncodedColumn, ...]
    raw_bytes: int


def encode_batch(documents: Sequence[RawDocument], tokenizer: Tokenizer, settings: EncodeSettings) -> EncodedBatch:
    """Return the ids of the documents under every key. Raises DataError for a document that is no text."""
    rows = [texts_of(document, settings.keys) for document in documents]
    columns = [_encode_column(texts, tokenizer, settings.append_eod) for texts in zip(*rows, strict=True)]
    return EncodedBatch(tuple(columns), sum(len(document.content) for document in documents))


def _encode_column(texts: Sequence[str | None], tokenizer: Tokenizer, append_eod: bool) -> EncodedColumn:
    ids: list[int] = []
    lengths: list[int] = []
    for text in texts:
        document = tokenizer.encode(text) if text and text.strip() else []
        if not document:
            continue
        if append_eod:
            document.append(tokenizer.eod)
        ids += document
        lengths.append(len(document))
    return EncodedColumn(np.array(ids, dtype=np.int32), lengths, len(texts) - len(lengths))


def encode_documents(
    documents: Iterator[RawDocument], tokenizer: Tokenizer, settings: EncodeSettings, num_workers: int
) -> Iterator[EncodedBatch]:
    """Yield the encoded documents in their order, by `num_workers` other processes when that is more than one.

    Holds a few batches a worker in memory, however long the input is. Raises DataError for a document that is no text,
    or when a worker dies.
    """
    batches = batched(documents)
    if num_workers == 1:
        yield from (encode_batch(batch, tokenizer, settings) for batch in batches)
        return
    # Spawned and not forked: the tokenizer of this process may have threads by now.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(settings,))
    pending: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_work, batch))
            if len(pending) >= BATCHES_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(f"one of {num_workers} worker processes died; with little memory, use fewer") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def batched(documents: Iterator[RawDocument]) -> Iterator[list[RawDocument]]:
    """Gather documents to batches of about BATCH_BYTES, in their order."""
    batch: list[RawDocument] = []
    size_bytes = 0
    for document in documents:
        batch.append(document)
        size_bytes += len(document.content)
        if size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class _Worker:
    tokenizer: Tokenizer
    settings: EncodeSettings


_worker: _Worker | None = None


def _start_worker(settings: EncodeSettings) -> None:
    global _worker  # a process pool has no other way to keep a tokenizer between two calls
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = _Worker(settings.build(), settings)


def _work(batch: list[RawDocument]) -> EncodedBatch:
    assert _worker is not None
    return encode_batch(batch, _worker.tokenizer, _worker.settings)
