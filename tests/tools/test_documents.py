"""Documents of input files."""

import gzip
import json

import pytest

from megatron.errors import DataError
from tools.datasets.documents import find_inputs, raw_documents, texts_of


def all_texts(*inputs, keys=("text",)):
    return [texts_of(document, keys) for document in raw_documents(find_inputs([str(i) for i in inputs]))]


def test_files_folders_and_commas_are_read_in_order(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "a1"}\n\n  \n{"text": "a2"}')
    (tmp_path / "folder" / "z.txt").write_text("whole\nfile\n")
    (tmp_path / "folder" / "b.json").write_text('{"text": "b"}\n')
    (tmp_path / "folder" / "notes.md").write_text("not read")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as stream:
        stream.write('{"text": "c"}\n')
    found = all_texts(f"{tmp_path / 'c.jsonl.gz'},{tmp_path / 'a.jsonl'}", tmp_path / "folder")
    assert found == [["c"], ["a1"], ["a2"], ["b"], ["whole\nfile\n"]]


def test_keys_are_read_in_the_order_asked_for(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"x": "1", "y": None, "z": "3"}))
    assert all_texts(tmp_path / "a.jsonl", keys=("z", "y", "x", "w")) == [["3", None, "1", None]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "ok"}\n{"text": "cut', "line 2 is not JSON"),
        (b'{"text": "ok"}\n["text"]\n', "line 2 is not a JSON object but a list"),
        (b'{"text": 5}\n', "line 1 has int under 'text'; expected text or null"),
        (b'\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
    ],
)
def test_document_that_is_no_text_is_named(tmp_path, content, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        all_texts(path)
    assert f"'{path}' {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", None, "does not exist"),
        ("a.jsonl.zst", b"x", "does not end in one of .*zstd -dc"),
        ("a.csv", b"x", "does not end in one of"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9)[:-9], "cannot be read"),
    ],
)
def test_input_that_cannot_be_read_is_named(tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        all_texts(path)
    assert str(path) in str(caught.value)


def test_folder_without_documents_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no file that ends in"):
        all_texts(tmp_path)
