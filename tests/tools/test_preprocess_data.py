"""From documents to token files; read back as plain numbers, and compared with the tokenizers library's own ids."""

import itertools
import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenization_record import check_tokenizer, read_record
from megatron.errors import DataError
from megatron.tokenizer import build_tokenizer
from tests.tools.scripts import assert_refused, run_script
from tools.datasets import encode, preprocess_data
from tools.datasets.documents import raw_documents
from tools.datasets.encode import EncodeSettings, encode_documents
from tools.datasets.train_tokenizer import train_tokenizer

ARGPARSE = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text("utf-8")


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "tokenizer.json"
    train_tokenizer(iter([ARGPARSE]), 400).save(str(path))
    return path


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def preprocess(source, prefix, vocab_file, *more):
    arguments = ["--input", source, "--output-prefix", prefix, "--tokenizer-type", "HFTokenizer"]
    preprocess_data.main([str(argument) for argument in [*arguments, "--vocab-file", vocab_file, *more]])


def documents_of(prefix):
    dataset = IndexedDataset(prefix)
    return [
        np.concatenate([dataset[i] for i in range(first, last)]).tolist()
        for first, last in itertools.pairwise(dataset.document_indices)
    ]


def test_script_writes_what_the_library_encodes(tmp_path, vocab_file):
    texts = [ARGPARSE[start : start + 700] for start in range(0, len(ARGPARSE), 700)] + ["naïve 🙂"]
    source = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    prefix = tmp_path / "new" / "folder" / "out"
    arguments = ["--tokenizer-type", "HFTokenizer", "--vocab-file", vocab_file, "--append-eod", "--workers", 2]
    done = run_script("preprocess_data.py", "--input", source, "--output-prefix", prefix, *arguments)
    assert done.returncode == 0, done.stderr
    library = tokenizers.Tokenizer.from_file(str(vocab_file))
    expected = [[*library.encode(text).ids, library.token_to_id("<|endoftext|>")] for text in texts]
    assert documents_of(f"{prefix}_text_document") == expected
    raw = np.fromfile(f"{prefix}_text_document.bin", dtype="<u2")
    assert raw.tolist() == [token for document in expected for token in document]
    assert f"{len(texts)} documents, {len(raw):,} tokens (uint16), 0 documents without text" in done.stdout
    assert done.stderr == ""  # no progress bar where there is no terminal


def test_without_append_eod_nothing_is_added(tmp_path, vocab_file):
    preprocess(write_rows(tmp_path / "a.jsonl", [{"text": "a b"}]), tmp_path / "out", vocab_file)
    library = tokenizers.Tokenizer.from_file(str(vocab_file))
    assert documents_of(tmp_path / "out_text_document") == [library.encode("a b").ids]


def test_number_of_workers_changes_nothing(tmp_path, vocab_file, monkeypatch):
    rows = [{"text": ARGPARSE[n * 37 : n * 60] or None} for n in range(300)]
    source = write_rows(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr(encode, "BATCH_BYTES", 5000)
    for workers in (1, 3):
        preprocess(source, tmp_path / f"out{workers}", vocab_file, "--append-eod", "--workers", workers)
    for suffix in ("bin", "idx", "meta.json"):
        one, three = (tmp_path / f"out{n}_text_document.{suffix}" for n in (1, 3))
        assert one.read_bytes() == three.read_bytes()


EMPTY_ROWS = [{"text": ""}, {"text": " \n\t\u3000"}, {"text": None}, {"other": "x"}]


@pytest.mark.parametrize("empty", EMPTY_ROWS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_document_without_text_is_left_out_and_counted(tmp_path, vocab_file, empty, place, capsys):
    rows = [{"text": "one"}, {"text": "two"}]
    rows.insert(place, empty)
    preprocess(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out", vocab_file, "--append-eod")
    tokenizer = build_tokenizer("HFTokenizer", vocab_file)
    texts = [tokenizer.decode(document) for document in documents_of(tmp_path / "out_text_document")]
    assert texts == ["one<|endoftext|>", "two<|endoftext|>"]
    assert "1 documents without text left out" in capsys.readouterr().out
    assert read_record(tmp_path / "out_text_document").num_skipped == 1


def test_only_documents_without_text_are_refused_and_leave_no_file(tmp_path, vocab_file):
    source = write_rows(tmp_path / "a.jsonl", EMPTY_ROWS)
    with pytest.raises(DataError, match="none of 4 documents has text under 'text'"):
        preprocess(source, tmp_path / "out", vocab_file, "--append-eod")
    assert list(tmp_path.iterdir()) == [source]


def test_each_key_has_its_own_files(tmp_path, vocab_file):
    rows = [{"a": "one", "b": "eins"}, {"a": None, "b": "zwei"}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    preprocess(source, tmp_path / "out", vocab_file, "--jsonl-keys", "b", "a")
    tokenizer = build_tokenizer("HFTokenizer", vocab_file)
    for key, texts in (("a", ["one"]), ("b", ["eins", "zwei"])):
        documents = documents_of(tmp_path / f"out_{key}_document")
        assert [tokenizer.decode(document) for document in documents] == texts


def test_key_without_text_stops_all_keys(tmp_path, vocab_file):
    source = write_rows(tmp_path / "a.jsonl", [{"a": "one"}])
    with pytest.raises(DataError, match="under 'b'"):
        preprocess(source, tmp_path / "out", vocab_file, "--json-keys", "a", "b")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(65499, "u2"), (65500, "u2"), (65535, "u2"), (65536, "u2"), (65537, "i4"), (65538, "i4")],
)
def test_largest_ids_never_wrap(tmp_path, vocab_size, dtype):
    top = vocab_size - 1
    vocab = {f"w{n}": n for n in range(vocab_size - 2)} | {"top": top - 1, "<|endoftext|>": top}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "words.json"))
    source = write_rows(tmp_path / "a.jsonl", [{"text": "w1 top w2"}])
    preprocess(source, tmp_path / "out", tmp_path / "words.json", "--append-eod")
    assert np.fromfile(tmp_path / "out_text_document.bin", dtype=dtype).tolist() == [1, top - 1, 2, top]
    assert documents_of(tmp_path / "out_text_document") == [[1, top - 1, 2, top]]


def test_record_names_the_tokenizer(tmp_path, vocab_file):
    preprocess(write_rows(tmp_path / "a.jsonl", [{"text": "a b"}]), tmp_path / "out", vocab_file, "--append-eod")
    prefix = tmp_path / "out_text_document"
    assert check_tokenizer(prefix, build_tokenizer("HFTokenizer", vocab_file)) is True
    with pytest.raises(DataError, match="was tokenized with HFTokenizer"):
        check_tokenizer(prefix, build_tokenizer("CharLevelTokenizer", None))
    record = read_record(prefix)
    assert (record.append_eod, record.num_documents, record.num_tokens) == (True, 1, len(documents_of(prefix)[0]))


def test_bad_line_leaves_the_files_of_the_run_before(tmp_path, vocab_file, monkeypatch):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "before"}])
    preprocess(source, tmp_path / "out", vocab_file)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path != source}
    source.write_text('{"text": "after"}\n' * 50 + "{bad")
    monkeypatch.setattr(encode, "BATCH_BYTES", 100)
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"a.jsonl' line 51 is not JSON"):
            preprocess(source, tmp_path / "out", vocab_file, "--workers", workers)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path != source} == before


def test_index_is_gone_while_files_are_exchanged(tmp_path, vocab_file, monkeypatch):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "before"}])
    preprocess(source, tmp_path / "out", vocab_file)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(preprocess_data, "write_record", killed)
    with pytest.raises(KeyboardInterrupt):
        preprocess(source, tmp_path / "out", vocab_file)
    assert not (tmp_path / "out_text_document.idx").exists()


class DyingSettings(EncodeSettings):
    """A tokenizer that takes its process down, wherever that is not the test's own."""

    def build(self):
        if os.getpid() != int(self.vocab_file):
            os._exit(9)
        return build_tokenizer("CharLevelTokenizer", None)


def test_worker_that_dies_ends_the_run(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "x"}])
    settings = DyingSettings("CharLevelTokenizer", str(os.getpid()), None, ("text",), False)
    with pytest.raises(DataError, match="one of 2 worker processes died"):
        list(encode_documents(raw_documents([source]), settings.build(), settings, 2))


def test_input_is_not_read_far_ahead_of_what_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_BYTES", 1)
    source = write_rows(tmp_path / "a.jsonl", [{"text": "x"}] * 50)
    read = []

    def documents():
        for document in raw_documents([source]):
            read.append(document.line)
            yield document

    settings = EncodeSettings("CharLevelTokenizer", None, None, ("text",), False)
    batches = encode_documents(documents(), settings.build(), settings, 2)
    next(batches)
    assert len(read) == 2 * encode.BATCHES_PER_WORKER
    batches.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokenizer-type", "HFTokenizer", "--vocab-file", "missing.json"), "'missing.json' does not exist"),
        (("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "v.json"), "needs merge_file"),
    ],
)
def test_vocabulary_that_cannot_be_used_is_refused(tmp_path, arguments, said):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "x"}])
    done = run_script("preprocess_data.py", "--input", source, "--output-prefix", tmp_path / "out", *arguments)
    assert_refused(done, said)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("more", [("--workers", "0"), ("--json-keys", "a", "a")])
def test_arguments_that_make_no_sense_are_refused(tmp_path, more, capsys):
    with pytest.raises(SystemExit) as ended:
        preprocess(tmp_path / "a.jsonl", tmp_path / "out", "v.json", *more)
    assert ended.value.code == 2
    assert more[0] in capsys.readouterr().err


def test_output_folder_that_cannot_be_made_is_refused(tmp_path, vocab_file):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(DataError, match="cannot write"):
        preprocess(source, source / "out", vocab_file)
