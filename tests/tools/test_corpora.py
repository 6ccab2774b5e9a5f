"""Corpora: the standard library of this interpreter, and files at hand."""

import json
import sysconfig
from pathlib import Path

import pytest

from megatron.errors import DataError
from tests.tools.scripts import assert_refused, run_script
from tools.datasets import corpora


def lines_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    done = run_script("corpora.py", "--name", "stdlib", "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder / "stdlib.jsonl", done.stdout


def test_stdlib_has_the_modules_as_they_are(stdlib):
    root = Path(sysconfig.get_path("stdlib"))
    texts = {line["meta"]["path"]: line["text"] for line in lines_of(stdlib[0])}
    for name in ("argparse.py", "asyncio/base_events.py", "json/decoder.py"):
        assert texts[name].encode() == (root / name).read_bytes()
    assert not [path for path in texts if "site-packages" in path or "/test" in path or path.startswith("test/")]


def test_stdlib_size_is_printed_and_real(stdlib):
    path, printed = stdlib
    texts = [line["text"] for line in lines_of(path)]
    size_mb = sum(len(text.encode()) for text in texts) / 1e6
    assert f"{len(texts):,} documents, {size_mb:.1f} MB of text" in printed
    assert 5 < size_mb < 20
    assert len(set(texts)) == len(texts)


def test_stdlib_is_the_same_each_time(stdlib, tmp_path):
    again = tmp_path / "again.jsonl"
    corpora.main(["--name", "stdlib", "--output", str(again)])
    assert again.read_bytes() == stdlib[0].read_bytes()


def test_folder_has_one_document_a_text_file_in_order(tmp_path, capsys):
    source = tmp_path / "source"
    (source / "b").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / "b" / "two.txt").write_text("zwei ü", "utf-8")
    (source / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (source / "c-copy.txt").write_text("one")
    (source / "d-blank.txt").write_text(" \n")
    (source / "e.bin").write_bytes(b"\xff\x00\xfe")
    (source / ".git" / "f.txt").write_text("hidden")
    corpora.main(["--name", "mine", "--input", str(source), "--output", str(tmp_path / "out")])
    assert lines_of(tmp_path / "out" / "mine.jsonl") == [
        {"text": "one", "meta": {"path": "a.txt"}},
        {"text": "zwei ü", "meta": {"path": "b/two.txt"}},
    ]
    assert "left out 1 duplicates, 1 files that could not be decoded" in capsys.readouterr().out


def test_file_is_cut_at_blank_lines(tmp_path):
    paragraphs = [f"{index} " + "ä" * 3000 for index in range(5)]
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs), "utf-8")
    corpora.main(["--name", "x", "--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "x.jsonl")])
    texts = [line["text"] for line in lines_of(tmp_path / "x.jsonl")]
    assert texts == ["\n\n".join(paragraphs[:2]), "\n\n".join(paragraphs[2:4]), paragraphs[4]]


def test_module_in_another_encoding_is_read_by_its_coding_line():
    assert corpora.python_source("# coding: latin-1\nx = 'é'\n".encode("latin-1")) == "# coding: latin-1\nx = 'é'\n"
    for content in (b"# coding: no-such\n", b"x = '\xe9'\n"):
        with pytest.raises(ValueError, match=r"."):
            corpora.python_source(content)


def test_corpus_that_fails_midway_leaves_what_was_there(tmp_path):
    output = tmp_path / "x.jsonl"
    output.write_text("before")

    def documents():
        yield corpora.Document("a", "text")
        raise DataError("midway")

    with pytest.raises(DataError, match="midway"):
        corpora.write_corpus(documents(), output)
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    assert output.read_text() == "before"


def test_what_cannot_be_made_is_refused(tmp_path):
    output = tmp_path / "x.jsonl"
    assert_refused(run_script("corpora.py", "--name", "enwik8", "--output", output), "'enwik8' needs --input")
    missing = tmp_path / "missing.txt"
    assert_refused(run_script("corpora.py", "--name", "x", "--input", missing, "--output", output), str(missing))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no text found"):
        corpora.main(["--name", "x", "--input", str(tmp_path / "empty"), "--output", str(output)])
    assert not output.exists()
