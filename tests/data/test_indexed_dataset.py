import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data import indexed_dataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_format import TOKEN_DTYPES, dtype_for_vocab
from megatron.data.indexed_writer import IndexedDatasetWriter, merge_datasets
from megatron.errors import DataError
from tests.data import megatron_core

DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16]


@pytest.fixture(scope="module")
def core():
    return megatron_core.load("indexed_dataset")


def core_write(core, prefix, documents, dtype):
    """`documents`: lists of sequences."""
    builder = core.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def our_write(prefix, documents, dtype):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for sequences in documents:
            for sequence in sequences:
                writer.add_sequence(sequence)
            writer.end_document()


def files(prefix):
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")]


documents_strategy = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=6), max_size=4), max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=documents_strategy, dtype=st.sampled_from(DTYPES))
def test_files_are_those_of_megatron_core_byte_for_byte(core, tmp_path, documents, dtype):
    core_write(core, tmp_path / "theirs", documents, dtype)
    our_write(tmp_path / "ours", documents, dtype)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=documents_strategy, dtype=st.sampled_from(DTYPES))
def test_reads_what_megatron_core_wrote(core, tmp_path, documents, dtype):
    core_write(core, tmp_path / "theirs", documents, dtype)
    dataset = IndexedDataset(tmp_path / "theirs")
    dataset.check_contents()
    assert dataset.dtype == dtype
    assert [s.tolist() for s in dataset] == [sequence for document in documents for sequence in document]
    whole = [[token for sequence in document for token in sequence] for document in documents]
    assert [dataset.documents(i, i + 1).tolist() for i in range(dataset.num_documents)] == whole
    for first in range(dataset.num_documents + 1):
        for last in range(first, dataset.num_documents + 1):
            assert dataset.documents(first, last).tolist() == [t for document in whole[first:last] for t in document]
            assert dataset.document_lengths(first, last).tolist() == [len(document) for document in whole[first:last]]


def test_megatron_core_reads_what_we_wrote(core, tmp_path, write_dataset, documents):
    theirs = core.IndexedDataset(write_dataset(documents))
    assert [theirs[i].tolist() for i in range(len(theirs))] == documents
    assert theirs.document_indices.tolist() == list(range(len(documents) + 1))


def test_merge_is_that_of_megatron_core(core, tmp_path, write_dataset, documents):
    parts = [write_dataset(documents[:9], "a"), write_dataset([], "b"), write_dataset(documents[9:], "c")]
    builder = core.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for part in parts:
        builder.add_index(part)
    builder.finalize(str(tmp_path / "theirs.idx"))
    merge_datasets(parts, tmp_path / "ours")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    assert files(tmp_path / "ours") == files(write_dataset(documents, "straight"))


def test_merge_refuses_another_token_type(write_dataset, tmp_path):
    parts = [write_dataset([[1]], "a", np.uint16), write_dataset([[1]], "b", np.int32)]
    with pytest.raises(DataError, match=r"b' stores int32, .*uint16"):
        merge_datasets(parts, tmp_path / "merged")
    assert not list(tmp_path.glob("*merged*"))


@pytest.mark.parametrize("vocab_size", [2, 256, 65499, 65500, 65535, 65536, 65537, 200_000])
def test_the_top_id_of_any_vocabulary_survives(core, write_dataset, vocab_size):
    prefix = write_dataset([[vocab_size - 1, 0]], dtype=dtype_for_vocab(vocab_size))
    assert IndexedDataset(prefix)[0].tolist() == [vocab_size - 1, 0]
    theirs = core.IndexedDataset(prefix)  # kept: its end unmaps the views it gave out
    assert theirs[0].tolist() == [vocab_size - 1, 0]
    assert dtype_for_vocab(vocab_size).itemsize == (2 if vocab_size <= 65536 else 4)
    if not 65500 <= vocab_size <= 65536:  # where megatron-core is generous with width
        assert dtype_for_vocab(vocab_size) == core.DType.optimal_dtype(vocab_size)


@pytest.mark.parametrize(("dtype", "bad"), [(np.uint16, 65536), (np.uint16, -1), (np.int32, 2**31), (np.int16, 32768)])
def test_an_id_that_does_not_fit_is_refused_and_nothing_is_left(tmp_path, dtype, bad):
    with pytest.raises(DataError, match=f"token id {bad} does not"), IndexedDatasetWriter(tmp_path / "x", dtype) as out:
        out.add_document([1, bad])
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_the_old_files(write_dataset, tmp_path):
    prefix = write_dataset([[1, 2]])
    before = files(prefix)
    with pytest.raises(KeyError), IndexedDatasetWriter(prefix, np.int32) as writer:
        writer.add_document([5])
        raise KeyError
    assert files(prefix) == before
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_published_before_the_end(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([5])
        assert not list(tmp_path.glob("x.*"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_pickles_without_the_mapped_files(write_dataset):
    dataset = IndexedDataset(write_dataset([list(range(5000))]))
    assert dataset[0].sum() == sum(range(5000))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000
    assert pickle.loads(pickled)[0].tolist() == list(range(5000))


def test_either_file_name_stands_for_the_prefix(write_dataset):
    prefix = write_dataset([[1, 2]])
    assert IndexedDataset(prefix + ".bin").prefix == IndexedDataset(prefix + ".idx").prefix == prefix


def change(name, function):
    def corrupt(folder):
        path = folder / name
        path.write_bytes(bytes(function(bytearray(path.read_bytes()))))

    return corrupt


def overwrite(offset, data):
    return change("corpus.idx", lambda raw: raw[:offset] + data + raw[offset + len(data) :])


def swap(folder):
    (folder / "corpus.idx").rename(folder / "other")
    (folder / "corpus.bin").rename(folder / "corpus.idx")
    (folder / "other").rename(folder / "corpus.bin")


# Three sequences of 2, 0 and 3 uint16 tokens in three documents: pointers from byte 46, boundaries from byte 70.
CORRUPTIONS = {
    "no bin": (lambda folder: (folder / "corpus.bin").unlink(), r"corpus\.bin does not exist"),
    "no idx": (lambda folder: (folder / "corpus.idx").unlink(), r"corpus\.idx does not exist"),
    "empty idx": (change("corpus.idx", lambda raw: b""), r"corpus\.idx is empty; it should start with b'MMIDIDX"),
    "header cut": (change("corpus.idx", lambda raw: raw[:20]), "cut off: 20 bytes, its header alone has 34"),
    "idx cut": (change("corpus.idx", lambda raw: raw[:-1]), r"cut off: 101 bytes.*3 sequences.*which take 102"),
    "idx too long": (change("corpus.idx", lambda raw: raw + b"xx"), r"too long: 104 bytes"),
    "multimodal": (change("corpus.idx", lambda raw: raw + b"\0\0\0"), "multimodal"),
    "swapped": (swap, r"starts with .*expected b'MMIDIDX.*the two files are swapped"),
    "magic": (overwrite(0, b"TNTIDX\0\0\0"), r"b'TNTIDX\\x00\\x00\\x00', expected b'MMIDIDX.*lazy"),
    "version": (overwrite(9, struct.pack("<Q", 2)), "has format version 2; this reads version 1"),
    "float tokens": (overwrite(17, b"\x07"), "token type code 7, which is no integer type"),
    "bin odd": (change("corpus.bin", lambda raw: raw[:-1]), "has 9 bytes, no whole number of uint16 tokens"),
    "bin cut": (change("corpus.bin", lambda raw: raw[:-2]), "shorter than .* says: 8 bytes, expected 10"),
    "bin empty": (change("corpus.bin", lambda raw: b""), "shorter than .* says: 0 bytes, expected 10"),
    "bin of another": (change("corpus.bin", lambda raw: raw + b"xx"), "longer than .* says: 12 bytes, expected 10"),
    "document ends": (overwrite(94, struct.pack("<q", 2)), "documents run from 0 to 2, expected 0 to 3"),
    "counts": (overwrite(18, struct.pack("<Q", 2**60)), f"header says {2**60} sequences"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_files_are_refused_at_opening_with_names_and_numbers(write_dataset, tmp_path, name):
    corrupt, message = CORRUPTIONS[name]
    prefix = write_dataset([[1, 2], [], [3, 4, 5]])
    IndexedDataset(prefix)
    corrupt(tmp_path)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (overwrite(34, struct.pack("<i", -2)), "sequence 0 has -2 tokens"),
        (overwrite(38, struct.pack("<i", 7)), "sequence 2 starts at byte 4, the one before it ends at byte 18"),
        (overwrite(78, struct.pack("<q", 9)), "document 1 ends before it starts"),
    ],
)
@pytest.mark.parametrize("entries_at_once", [1, 2, 1 << 20])
def test_corruption_inside_the_index_is_found_by_the_full_check(
    write_dataset, tmp_path, monkeypatch, corrupt, message, entries_at_once
):
    monkeypatch.setattr(indexed_dataset, "_CHECK_ENTRIES", entries_at_once)
    prefix = write_dataset([[1, 2], [], [3, 4, 5]])
    IndexedDataset(prefix).check_contents()
    corrupt(tmp_path)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix).check_contents()


def test_paths_that_are_not_prefixes(write_dataset, tmp_path):
    one, two = write_dataset([[1]], "one"), write_dataset([[1]], "two")
    with pytest.raises(DataError, match=r"is a directory \(it holds one, two\)"):
        IndexedDataset(tmp_path)
    with pytest.raises(DataError, match="give several as a list in train_data_paths"):
        IndexedDataset(f"{one},{two}")
    with pytest.raises(DataError, match=r"do not exist; data sets in that directory: .*one, .*two"):
        IndexedDataset(tmp_path / "three")
    with pytest.raises(DataError, match=r"nowhere/x\.idx and .*nowhere/x\.bin do not exist$"):
        IndexedDataset(tmp_path / "nowhere" / "x")


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/x\.bin"):
        IndexedDatasetWriter(tmp_path / "file" / "x", np.uint16)


def test_every_code_is_that_of_megatron_core(core):
    for code, dtype in TOKEN_DTYPES.items():
        assert core.DType.dtype_from_code(code) == dtype


def test_warm_up_reads_both_files(write_dataset):
    IndexedDataset(write_dataset([[1, 2]])).warm_up()
