import numpy as np
import pytest

from megatron.data import build as build_module
from megatron.data.build import SplitSizes, build_train_valid_test, train_samples_in_epochs
from megatron.errors import ConfigError, DataError
from megatron.neox_arguments.data import DataArgs


def build(arguments, sizes=(20, 4, 2), *, is_builder=True, wait=lambda: None, seq_length=8):
    return build_train_valid_test(
        arguments,
        seq_length=seq_length,
        seed=1234,
        num_samples=SplitSizes(*sizes),
        is_builder=is_builder,
        wait=wait,
    )


def tokens(dataset):
    return {int(token) for sample in dataset for token in sample}


def test_splits_have_the_samples_asked_for_from_disjoint_documents(write_dataset, documents):
    arguments = DataArgs(data_path=write_dataset(documents), split="6,2,2", mmap_warmup=True)
    splits = build(arguments, (200, 50, 30))
    assert [len(s) for s in (splits.train, splits.valid, splits.test)] == [200, 50, 30]
    seen = [tokens(s) for s in (splits.train, splits.valid, splits.test)]
    assert sum(map(len, seen)) == len(set.union(*seen)) == sum(map(len, documents))
    assert all(sample.shape == (9,) for sample in splits.valid)


def test_what_is_not_read_is_not_built(write_dataset, documents, tmp_path):
    splits = build(DataArgs(data_path=write_dataset(documents)), (20, 0, 0))
    assert splits.valid is None
    assert splits.test is None
    assert len(list((tmp_path / "index-cache").iterdir())) == 1


def test_a_small_data_set_leaves_out_what_it_cannot_fill(write_dataset, caplog):
    splits = build(DataArgs(data_path=write_dataset([[1, 2, 3]])))
    assert len(splits.train) == 20
    assert splits.valid is None
    assert splits.test is None
    assert "no documents for the valid split" in caplog.text


def test_the_builder_builds_before_waiting_and_the_others_after(write_dataset, documents, monkeypatch):
    arguments = DataArgs(data_path=write_dataset(documents), split="6,2,2")
    events = []
    original = build_module.ensure_cached
    monkeypatch.setattr(build_module, "ensure_cached", lambda r: (events.append("build"), original(r)))
    first = build(arguments, wait=lambda: events.append("wait"))
    assert events == ["build"] * 3 + ["wait"]
    monkeypatch.setattr("megatron.data.index_cache.build_sample_index", None)
    second = build(arguments, is_builder=False, wait=lambda: events.append("wait"))
    assert events == ["build"] * 3 + ["wait"] * 2
    assert [s.tolist() for s in first.train] == [s.tolist() for s in second.train]


def test_a_failing_builder_still_meets_the_others(write_dataset, tmp_path):
    arguments = DataArgs(data_path=write_dataset([[1, 2], [3], [4]]))
    raw = bytearray((tmp_path / "corpus.idx").read_bytes())
    raw[34] = 9
    (tmp_path / "corpus.idx").write_bytes(raw)
    waits = []
    for is_builder in (True, False):
        with pytest.raises(DataError, match="sequence 1 starts at byte 4"):
            build(arguments, is_builder=is_builder, wait=lambda: waits.append(1))
    assert len(waits) == 2


def test_longer_training_keeps_the_samples_before(write_dataset, documents):
    arguments = DataArgs(data_path=write_dataset(documents))
    short, long = build(arguments, (30, 0, 0)).train, build(arguments, (500, 0, 0)).train
    assert [s.tolist() for s in short] == [long[i].tolist() for i in range(30)]


def test_separate_paths_are_blended_by_their_weights(write_dataset):
    paths = [write_dataset([[base] * 50] * 4, f"set{base}") for base in (1, 2, 3)]
    arguments = DataArgs(
        train_data_paths=paths, train_data_weights=[3, 0, 1], valid_data_paths=paths[1:2], test_data_paths=paths[:2]
    )
    splits = build(arguments, (400, 10, 100))
    count = np.bincount([sample[0] for sample in splits.train])
    assert count.tolist() == [0, 300, 0, 100]
    assert tokens(splits.valid) == {2}
    assert np.bincount([sample[0] for sample in splits.test]).tolist() == [0, 50, 50]


def test_weights_by_number_of_documents(write_dataset):
    paths = [write_dataset([[base] * 5] * n, f"set{base}") for base, n in ((1, 10), (2, 90))]
    arguments = DataArgs(train_data_paths=paths, weight_by_num_documents=True, weighted_sampler_alpha=0.5)
    train = build(arguments, (400, 0, 0)).train
    assert np.bincount([sample[0] for sample in train]).tolist() == [0, 100, 300]


def test_samples_in_epochs(write_dataset, documents):
    prefix = write_dataset(documents)
    num_tokens = sum(map(len, documents))
    assert train_samples_in_epochs(DataArgs(train_data_paths=[prefix] * 2), seq_length=8, num_epochs=3) == 2 * (
        (3 * num_tokens - 1) // 8
    )
    splits = build(DataArgs(data_path=prefix, split="1,1,0"), (1, 0, 0))
    some = DataArgs(data_path=prefix, split="1,1,0")
    assert (
        train_samples_in_epochs(some, seq_length=8, num_epochs=2)
        == (2 * sum(map(len, documents[: splits.train.request.last_document])) - 1) // 8
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, DataError, "set data_path, or train_data_paths"),
        ({"data_path": "{tmp}/none"}, DataError, r"none\.idx and .*none\.bin do not exist"),
        ({"data_path": "{data}", "split": "0,1,1"}, DataError, "split '0,1,1' leaves no documents of .*corpus'"),
        ({"data_path": "{data}", "split": "x"}, ConfigError, "split 'x'"),
        ({"data_path": "{data}", "train_data_paths": ["{data}"]}, ConfigError, "exclude each other"),
        ({"train_data_paths": ["{data}"], "train_data_weights": [1, 2]}, ConfigError, "2 weights for 1 data sets"),
        ({"train_data_paths": ["{empty}"]}, DataError, "empty': no tokens in its 2 documents"),
        ({"train_data_paths": ["{nothing}"]}, DataError, "nothing': no tokens in its 0 documents"),
    ],
)
def test_what_cannot_be_used_is_refused(write_dataset, tmp_path, arguments, error, message):
    places = {
        "tmp": tmp_path,
        "data": write_dataset([[1], [2], [3]]),
        "empty": write_dataset([[], []], "empty"),
        "nothing": write_dataset([], "nothing"),
    }

    def place(value):
        if isinstance(value, list):
            return [place(item) for item in value]
        return value.format(**places) if isinstance(value, str) else value

    with pytest.raises(error, match=message):
        build(DataArgs(**{name: place(value) for name, value in arguments.items()}))
