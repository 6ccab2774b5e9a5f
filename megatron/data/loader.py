"""The micro-batches of one data rank, in an order that depends on the number of consumed samples alone."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.data.gpt_dataset import TokenDataset
from megatron.data.micro_batch import Collate, MicroBatch
from megatron.errors import ConfigError, DataError

# What a terminal or a scheduler sends to a whole job to end it at the next step: the training process decides when, and
# needs its workers until then. (SIGTERM is one more, see `_outlive_job_signals`.)
_SIGNALS_OF_THE_JOB = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class MicroBatchOrder:
    """Which samples data rank `data_rank` reads in its n-th micro-batch.

    Micro-batch n of rank r holds the samples consumed + (n * num_data_ranks + r) * micro_batch_size and the following
    ones. So the data ranks together read the samples in order, and a global batch of N samples that starts at sample b
    is the set b .. b + N - 1 for every number of data ranks, micro-batch size and number of accumulation steps. Samples
    at the end that do not fill a micro-batch on every rank are left out.

    Iterating gives lists of sample numbers; it may be iterated any number of times.
    """

    num_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_rank: int
    num_data_ranks: int

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1 or not 0 <= self.data_rank < self.num_data_ranks:
            raise ConfigError(
                f"micro-batch size {self.micro_batch_size} on data rank {self.data_rank} of {self.num_data_ranks}"
            )
        if not 0 <= self.consumed_samples <= self.num_samples:
            raise DataError(
                f"cannot go on behind sample {self.consumed_samples}: the data set has {self.num_samples} samples"
            )

    def __len__(self) -> int:
        return (self.num_samples - self.consumed_samples) // (self.micro_batch_size * self.num_data_ranks)

    def __iter__(self) -> Iterator[list[int]]:
        start = self.consumed_samples + self.data_rank * self.micro_batch_size
        for _ in range(len(self)):
            yield list(range(start, start + self.micro_batch_size))
            start += self.micro_batch_size * self.num_data_ranks


class MicroBatchLoader:
    """Iterates over the micro-batches of one data rank; a new `iter()` starts over behind `order.consumed_samples`.

    What it yields depends on `dataset` and `order` only, not on `num_workers`. Only one iterator may be in use at a
    time. Leaves torch's global random state alone. Raises `DataError` when a token is not below `vocab_size`: the data
    was made with another tokenizer.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        order: MicroBatchOrder,
        *,
        collate: Collate,
        num_workers: int,
        vocab_size: int | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        """`pin_memory` None: where there is an accelerator to copy to."""
        self.order = order
        self.vocab_size = vocab_size
        self._collate = collate
        self._pin_memory = torch.accelerator.is_available() if pin_memory is None else pin_memory
        self._loader: torch.utils.data.DataLoader[NDArray[np.int64]] = torch.utils.data.DataLoader(
            dataset,  # type: ignore[arg-type]  # any object with __len__ and __getitem__ does
            batch_sampler=order,
            # Workers hand over arrays, which travel through a pipe; tensors would need files in /dev/shm, small in
            # containers, and a worker sharing one complains loudly when the training process is interrupted.
            collate_fn=np.stack,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=_outlive_job_signals,
            # A generator of its own: by default every new iterator draws a number from the global one.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        """Micro-batches of this rank."""
        return len(self.order)

    def __iter__(self) -> Iterator[MicroBatch]:
        for number, samples in enumerate(self._loader):
            if self.vocab_size is not None:
                self._check_tokens(samples, number, self.vocab_size)
            batch = self._collate(samples)
            yield batch.pin_memory() if self._pin_memory else batch

    def _check_tokens(self, samples: NDArray[np.int64], number: int, vocab_size: int) -> None:
        lowest, highest = int(samples.min()), int(samples.max())
        if lowest < 0 or highest >= vocab_size:
            bad = lowest if lowest < 0 else highest
            stride = self.order.micro_batch_size * self.order.num_data_ranks
            first = self.order.consumed_samples + number * stride + self.order.data_rank * self.order.micro_batch_size
            raise DataError(
                f"token id {bad} in samples {first} to {first + self.order.micro_batch_size - 1}, but the model's "
                f"vocabulary has {vocab_size} ids: the data was made with another tokenizer"
            )


def _outlive_job_signals(worker: int) -> None:
    """Ignore signals meant for the training process, whose handlers a forked worker would otherwise have inherited.

    SIGTERM is also how the training process ends a worker, when it exits with the loader still in use. So that one
    counts if it comes from there, and not from a scheduler that sends it to all processes of the job. Where the sender
    cannot be known (no `sigwaitinfo`), SIGTERM ends the worker. A worker whose parent is gone ends by itself anyhow.
    """
    for number in _SIGNALS_OF_THE_JOB:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_at_a_word_of, args=(os.getppid(),), daemon=True).start()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_at_a_word_of(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
