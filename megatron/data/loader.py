"""The micro-batches of one data rank, in an order that depends on the number of consumed samples alone."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.data.gpt_dataset import TokenDataset
from megatron.data.micro_batch import Collate, MicroBatch
from megatron.errors import ConfigError, DataError

# What a terminal or a scheduler sends to a whole job to end it at the next step: the training process decides when, and
# needs its workers until then.
_SIGNALS_OF_THE_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
        self._loader: torch.utils.data.DataLoader[MicroBatch] = torch.utils.data.DataLoader(
            dataset,  # type: ignore[arg-type]  # any object with __len__ and __getitem__ does
            batch_sampler=order,
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=torch.accelerator.is_available() if pin_memory is None else pin_memory,
            persistent_workers=num_workers > 0,
            worker_init_fn=_outlive_job_signals,
            # A generator of its own: by default every new iterator draws a number from the global one.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        """Micro-batches of this rank."""
        return len(self.order)

    def __iter__(self) -> Iterator[MicroBatch]:
        for number, batch in enumerate(self._loader):
            if self.vocab_size is not None:
                self._check_tokens(batch, number)
            yield batch

    def _check_tokens(self, batch: MicroBatch, number: int) -> None:
        assert self.vocab_size is not None
        lowest = min(int(batch.tokens_BS.min()), int(batch.labels_BS.min()))
        highest = max(int(batch.tokens_BS.max()), int(batch.labels_BS.max()))
        if lowest < 0 or highest >= self.vocab_size:
            bad = lowest if lowest < 0 else highest
            stride = self.order.micro_batch_size * self.order.num_data_ranks
            first = self.order.consumed_samples + number * stride + self.order.data_rank * self.order.micro_batch_size
            raise DataError(
                f"token id {bad} in samples {first} to {first + self.order.micro_batch_size - 1}, but the model's "
                f"vocabulary has {self.vocab_size} ids: the data was made with another tokenizer"
            )


def _outlive_job_signals(worker: int) -> None:
    """Ignore signals meant for the training process, whose handlers a forked worker would otherwise have inherited.

    A worker never outlives it all the same: it ends when told to, and when its parent is gone.
    """
    for number in _SIGNALS_OF_THE_JOB:
        signal.signal(number, signal.SIG_IGN)
