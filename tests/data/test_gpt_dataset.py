import multiprocessing
import os
import pickle
import signal

import numpy as np
import pytest
import safetensors.numpy

from megatron.data import index_cache
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_cache import IndexRequest, ensure_cached, open_index
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sample_index import SampleIndex, samples_in_epochs
from megatron.errors import DataError

NAMES = ("document_order", "sample_starts", "sample_order")


def request(prefix, first=0, last=None, seq_length=8, num_epochs=3, seed=1):
    dataset = IndexedDataset(prefix)
    return IndexRequest(dataset, first, dataset.num_documents if last is None else last, seq_length, num_epochs, seed)


def same(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in NAMES)


@pytest.mark.parametrize("seq_length", [1, 3, 8, 50, 1000])
def test_samples_are_the_stream_of_shuffled_documents(write_dataset, documents, seq_length):
    ask = request(write_dataset(documents), 2, 21, seq_length)
    index = ask.build()
    stream = [token for document in index.document_order for token in documents[2 + document]]
    dataset = GPTDataset(ask, index.num_samples)
    assert len(dataset) == (len(stream) - 1) // seq_length
    for sample in range(len(dataset)):
        start = int(index.sample_order[sample]) * seq_length
        tokens = dataset[sample]
        assert tokens.dtype == np.int64
        assert tokens.tolist() == stream[start : start + seq_length + 1]


def test_one_epoch_predicts_every_token_but_the_first_once(write_dataset, documents):
    num_tokens = sum(map(len, documents))
    ask = request(write_dataset(documents), seq_length=1, num_epochs=1)
    labels = sorted(token for sample in GPTDataset(ask, num_tokens - 1) for token in sample[1:])
    first = ask.build().document_order
    stream_start = next(documents[d][0] for d in first if documents[d])
    assert labels == [token for token in range(1, num_tokens + 1) if token != stream_start]


def test_behind_the_end_is_an_index_error(write_dataset, documents):
    dataset = GPTDataset(request(write_dataset(documents)), 4)
    assert len(list(dataset)) == 4
    for sample in (4, -1):
        with pytest.raises(IndexError):
            dataset[sample]


def test_pickling_reopens_the_files(write_dataset, documents):
    dataset = GPTDataset(request(write_dataset(documents)), 9)
    ensure_cached(dataset.request)
    before = [sample.tolist() for sample in dataset]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000
    assert [sample.tolist() for sample in pickle.loads(pickled)] == before


def test_cached_index_is_the_built_one_and_is_mapped(write_dataset, documents, monkeypatch):
    ask = request(write_dataset(documents))
    built = ask.build()
    ensure_cached(ask)
    monkeypatch.setattr(index_cache, "build_sample_index", None)
    ensure_cached(ask)
    cached = open_index(ask)
    assert same(cached, built)
    assert not cached.sample_order.flags.writeable
    others = safetensors.numpy.load_file(ask.cache_path())
    assert same(SampleIndex(**others), built)


@pytest.mark.parametrize("changed", ["first", "last", "seq_length", "num_epochs", "seed"])
def test_whatever_matters_changes_the_key(write_dataset, documents, changed):
    prefix = write_dataset(documents)
    ordinary = {"first": 1, "last": 20, "seq_length": 8, "num_epochs": 3, "seed": 1}
    assert request(prefix, **ordinary).cache_path() == request(prefix, **ordinary).cache_path()
    other = ordinary | {changed: ordinary[changed] + 1}
    assert request(prefix, **ordinary).cache_path() != request(prefix, **other).cache_path()


def test_other_data_of_the_same_size_at_the_same_time_changes_the_key(write_dataset, tmp_path):
    ask = request(write_dataset([[1, 2, 3], [4]]))
    stat = (tmp_path / "corpus.idx").stat()
    before = ask.cache_path()
    write_dataset([[1], [2, 3, 4]])
    os.utime(tmp_path / "corpus.idx", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert request(ask.dataset.prefix).cache_path() != before


@pytest.mark.parametrize("damage", [0, 4, 7, 20, "half", "last byte", "header", "flipped"])
def test_a_damaged_cache_file_is_built_again(write_dataset, documents, damage):
    ask = request(write_dataset(documents))
    ensure_cached(ask)
    path = ask.cache_path()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-5] ^= 0x40
    cuts = {"half": len(whole) // 2, "last byte": len(whole) - 1}
    changed = {"header": whole[:8] + b"x" * 50 + whole[58:], "flipped": bytes(flipped)}
    path.write_bytes(changed[damage] if damage in changed else whole[: cuts.get(damage, damage)])
    if damage != "flipped":  # only the builder reads the checksum
        assert same(open_index(ask), ask.build())
    ensure_cached(ask)
    assert path.read_bytes() == whole


def write_and_die(ask):
    """Killed between writing and publishing."""
    index_cache.AtomicFile.publish = lambda file: os.kill(os.getpid(), signal.SIGKILL)
    ensure_cached(ask)


def test_a_killed_builder_leaves_nothing_that_is_read(write_dataset, documents):
    ask = request(write_dataset(documents))
    child = multiprocessing.get_context("fork").Process(target=write_and_die, args=(ask,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not ask.cache_path().exists()
    assert len(list(ask.cache_path().parent.iterdir())) == 1
    ensure_cached(ask)
    assert same(open_index(ask), ask.build())


def race(ask, barrier, queue):
    for _ in range(20):
        barrier.wait()
        ensure_cached(ask)
        queue.put(open_index(ask).sample_order.tolist())
        barrier.wait()
        ask.cache_path().unlink(missing_ok=True)


def test_two_builders_may_race(write_dataset, documents):
    ask = request(write_dataset(documents))
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(2), context.Queue()
    children = [context.Process(target=race, args=(ask, barrier, queue)) for _ in range(2)]
    for child in children:
        child.start()
    results = [queue.get(timeout=60) for _ in range(40)]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert all(result == ask.build().sample_order.tolist() for result in results)
    assert list(ask.cache_path().parent.iterdir()) == []


def test_without_a_place_to_write_every_process_builds_its_own(write_dataset, documents, tmp_path, caplog):
    ask = request(write_dataset(documents))
    (tmp_path / "index-cache").write_text("a file where the directory should be (root may write anywhere)")
    ensure_cached(ask)
    assert "every process builds its own" in caplog.text
    assert same(open_index(ask), ask.build())


def test_a_disk_that_fills_up_leaves_no_file(write_dataset, documents, monkeypatch, caplog):
    def full(array, file):
        raise OSError(28, "No space left on device")

    ask = request(write_dataset(documents))
    monkeypatch.setattr(index_cache, "_header", full)
    ensure_cached(ask)
    assert "No space left on device" in caplog.text
    assert list(ask.cache_path().parent.iterdir()) == []


def test_corrupted_data_is_an_error_for_builder_and_reader(write_dataset, tmp_path):
    ask = request(write_dataset([[1, 2], [3], [4]]))
    path = tmp_path / "corpus.idx"
    raw = bytearray(path.read_bytes())
    raw[34] = 9
    path.write_bytes(raw)
    for function in (ensure_cached, open_index):
        with pytest.raises(DataError, match="sequence 1 starts at byte 4"):
            function(ask)


def test_documents_of_several_sequences_stay_whole(tmp_path):
    from megatron.data.indexed_writer import IndexedDatasetWriter

    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        for document in ([[1, 2], [3]], [], [[4], [], [5, 6, 7]]):
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    ask = request(tmp_path / "x", seq_length=2, num_epochs=2)
    documents = [[1, 2, 3], [], [4, 5, 6, 7]]
    stream = [token for document in ask.build().document_order for token in documents[document]]
    samples = sorted(sample.tolist() for sample in GPTDataset(ask, samples_in_epochs(2, 7, 2)))
    assert samples == sorted(stream[i : i + 3] for i in range(0, 12, 2))
