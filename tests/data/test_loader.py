import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data.loader import MicroBatchLoader, MicroBatchOrder
from megatron.data.micro_batch import Collate, MicroBatch
from megatron.data.synthetic import SyntheticDataset
from megatron.errors import ConfigError, DataError


class Counting:
    """Sample i is [10 i, 10 i + 1, ...]: a batch tells which samples are in it."""

    def __init__(self, num_samples, seq_length=3):
        self.num_samples, self.seq_length = num_samples, seq_length

    def __len__(self):
        return self.num_samples

    def __getitem__(self, sample):
        return np.arange(10 * sample, 10 * sample + self.seq_length + 1, dtype=np.int64)


def loader(num_samples, *, consumed=0, micro=2, rank=0, ranks=1, num_workers=0, **options):
    dataset = options.pop("dataset", Counting(num_samples))
    order = MicroBatchOrder(num_samples, consumed, micro, rank, ranks)
    options.setdefault("collate", Collate())
    return MicroBatchLoader(dataset, order, num_workers=num_workers, **options)


def samples(batch):
    return (batch.tokens_BS[:, 0] // 10).tolist()


def global_batches(batch_size, num_samples, micro, ranks, consumed=0):
    """The samples of each global batch as concatenated over ranks for each micro-batch."""
    streams = [list(MicroBatchOrder(num_samples, consumed, micro, rank, ranks)) for rank in range(ranks)]
    in_order = [sample for step in zip(*streams, strict=True) for piece in step for sample in piece]
    return [in_order[i : i + batch_size] for i in range(0, len(in_order), batch_size)]


@pytest.mark.parametrize(("micro", "ranks"), [(12, 1), (1, 1), (3, 1), (3, 2), (1, 4), (2, 3), (4, 3), (6, 2)])
@pytest.mark.parametrize("consumed", [0, 12, 7])
def test_a_global_batch_is_the_same_for_every_number_of_ranks_and_micro_batches(micro, ranks, consumed):
    last = consumed + 60
    expected = [list(range(start, start + 12)) for start in range(consumed, last, 12)]
    assert global_batches(12, last, micro, ranks, consumed) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumes_at_every_sample(num_workers):
    straight = [samples(batch) for batch in loader(20, micro=2, num_workers=num_workers)]
    assert straight == [[i, i + 1] for i in range(0, 20, 2)]
    for consumed in range(0, 21, 2 if num_workers == 0 else 10):
        resumed = [samples(batch) for batch in loader(20, consumed=consumed, num_workers=num_workers)]
        assert resumed == straight[consumed // 2 :]
    assert [samples(batch) for batch in loader(20, consumed=5, num_workers=num_workers)][:2] == [[5, 6], [7, 8]]


def test_all_ranks_have_equally_many_micro_batches():
    for num_samples in range(20):
        lengths = {len(loader(num_samples, micro=2, rank=rank, ranks=3)) for rank in range(3)}
        assert lengths == {num_samples // 6}
        assert len(list(loader(num_samples, micro=2, rank=2, ranks=3))) == num_samples // 6


def test_impossible_orders_are_refused():
    with pytest.raises(DataError, match="behind sample 21: the data set has 20 samples"):
        loader(20, consumed=21)
    with pytest.raises(ConfigError, match="data rank 2 of 2"):
        loader(20, rank=2, ranks=2)
    with pytest.raises(ConfigError, match="micro-batch size 0"):
        loader(20, micro=0)


def test_labels_are_the_next_tokens_and_all_count():
    batch = next(iter(loader(4)))
    assert batch.tokens_BS.tolist() == [[0, 1, 2], [10, 11, 12]]
    assert batch.labels_BS.tolist() == [[1, 2, 3], [11, 12, 13]]
    assert batch.loss_mask_BS.tolist() == [[1.0] * 3] * 2
    assert [t.dtype for t in batch] == [torch.int64, torch.int64, torch.float32]
    assert all(t.is_contiguous() for t in batch)


def test_the_prediction_after_an_end_of_document_may_be_left_out():
    batch = Collate(masked_input_token=0)(np.array([[5, 0, 7, 0], [0, 0, 3, 4]]))
    assert batch.loss_mask_BS.tolist() == [[1, 0, 1], [0, 0, 1]]


def test_moves_to_a_device():
    batch = next(iter(loader(4))).to("meta")
    assert isinstance(batch, MicroBatch)
    assert {tensor.device.type for tensor in batch} == {"meta"}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_token_outside_the_vocabulary_names_its_samples(num_workers):
    batches = iter(loader(8, micro=2, rank=1, ranks=2, vocab_size=63, num_workers=num_workers))
    assert samples(next(batches)) == [2, 3]
    with pytest.raises(DataError, match=r"^token id 73 in samples 6 to 7, but the model's vocabulary has 63 ids"):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterating_again_starts_over_even_half_way(num_workers):
    repeated = loader(12, num_workers=num_workers)
    first = iter(repeated)
    assert [samples(next(first)) for _ in range(2)] == [[0, 1], [2, 3]]
    for _ in range(2):
        assert [samples(batch) for batch in repeated] == [[i, i + 1] for i in range(0, 12, 2)]


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    list(loader(4))
    assert torch.equal(torch.get_rng_state(), before)


def signal_from_elsewhere(number, pid):
    """As a scheduler does it, from a process that is not the worker's parent."""
    subprocess.run([sys.executable, "-c", f"import os; os.kill({pid}, {int(number)})"], check=True)


def test_workers_outlive_the_signals_that_end_a_job_and_end_with_the_training_process():
    old = signal.signal(signal.SIGTERM, lambda *_: None)  # a handler of the training process that workers inherit
    try:
        running = loader(400, num_workers=1)
        batches = iter(running)
        next(batches)
        (worker,) = running._loader._iterator._workers
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            os.kill(worker.pid, number)
        signal_from_elsewhere(signal.SIGTERM, worker.pid)
        assert [samples(batch) for batch in batches] == [[i, i + 1] for i in range(2, 400, 2)]
        assert worker.is_alive()
        worker.terminate()
        worker.join(timeout=30)
        assert worker.exitcode == 0
    finally:
        signal.signal(signal.SIGTERM, old)


INTERRUPTED = """
import sys
from megatron.data.loader import MicroBatchLoader, MicroBatchOrder
from megatron.data.micro_batch import Collate
from megatron.data.synthetic import SyntheticDataset

dataset = SyntheticDataset(num_samples=10**6, seq_length=64, vocab_size=100, seed=1)
order = MicroBatchOrder(10**6, 0, 4, 0, 1)
try:
    for number, _ in enumerate(MicroBatchLoader(dataset, order, collate=Collate(), num_workers=2)):
        if number == 5:
            print("running", flush=True)
except KeyboardInterrupt:
    sys.exit(3)
"""


def test_ctrl_c_ends_a_run_with_workers_at_once_and_quietly():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )
    assert run.stdout.readline() == "running\n"
    os.killpg(run.pid, signal.SIGINT)
    try:
        # The pipes close when the last worker is gone.
        _, errors = run.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 3
    assert errors == ""


def test_synthetic_samples_depend_on_seed_and_number_only():
    options = {"seq_length": 50, "vocab_size": 97}
    short = SyntheticDataset(num_samples=3, seed=1, **options)
    long = SyntheticDataset(num_samples=9, seed=1, **options)
    assert [s.tolist() for s in short] == [long[i].tolist() for i in range(3)]
    assert short[0].tolist() != short[1].tolist()
    assert short[0].tolist() != SyntheticDataset(num_samples=3, seed=2, **options)[0].tolist()
    assert all(s.shape == (51,) and s.dtype == np.int64 and s.min() >= 0 and s.max() < 97 for s in long)


@pytest.mark.parametrize(("kind", "low", "high"), [("learnable", 0.85, 0.95), ("random", 0.0, 0.05)])
def test_only_the_learnable_kind_can_be_predicted(kind, low, high):
    dataset = SyntheticDataset(num_samples=40, seq_length=200, vocab_size=97, seed=1, kind=kind)
    pairs = np.concatenate([np.stack([s[:-1], s[1:]]) for s in dataset], axis=1)
    table = np.zeros((97, 97))
    np.add.at(table, (pairs[0], pairs[1]), 1)
    assert low < table.max(axis=1).sum() / table.sum() < high
