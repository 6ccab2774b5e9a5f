"""Training a tokenizer on JSON lines."""

import json
import sysconfig
from pathlib import Path

import pytest
import tokenizers

from megatron.errors import ConfigError, DataError
from megatron.tokenizer import build_tokenizer
from tests.tools.scripts import assert_refused, run_script
from tools.datasets import train_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "some.jsonl"
    sources = [Path(sysconfig.get_path("stdlib"), name) for name in ("argparse.py", "textwrap.py", "ast.py")]
    rows = [{"text": source.read_text("utf-8")} for source in sources] + [{"text": None}, {}, {"text": " "}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    done = run_script("train_tokenizer.py", "--input", corpus, "--output", path, "--vocab-size", 1000)
    assert done.returncode == 0, done.stderr
    assert f"{path}: 1,000 entries" in done.stdout
    return path


def test_vocabulary_is_end_of_document_bytes_and_merges(trained):
    vocab = tokenizers.Tokenizer.from_file(str(trained)).get_vocab()
    assert sorted(vocab.values()) == list(range(1000))
    assert vocab["<|endoftext|>"] == 0
    assert {token for token, id in vocab.items() if 1 <= id <= 256} == set(
        tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )


def test_trained_tokenizer_shortens_its_text_and_gives_any_text_back(trained):
    tokenizer = build_tokenizer("HFTokenizer", trained)
    code = "        if self.parser is not None:\n            return self.parser\n"
    assert len(tokenizer.encode(code)) < len(code) / 2
    for text in (code, "日本語 🙂 \x00\x7f ﷽", " leading and trailing "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eod == 0


def test_same_text_gives_the_same_file(corpus, trained, tmp_path):
    again = tmp_path / "again.json"
    train_tokenizer.main(["--input", str(corpus), "--output", str(again), "--vocab-size", "1000"])
    assert again.read_bytes() == trained.read_bytes()


def test_merges_equal_those_of_the_librarys_own_recipe(corpus, trained, tmp_path):
    recipe = tokenizers.ByteLevelBPETokenizer()
    texts = [json.loads(line).get("text") for line in corpus.read_text().splitlines()]
    recipe.train_from_iterator([t for t in texts if t], 1000, show_progress=False, special_tokens=["<|endoftext|>"])
    recipe.save(str(tmp_path / "recipe.json"))
    expected = build_tokenizer("HFTokenizer", tmp_path / "recipe.json")
    assert build_tokenizer("HFTokenizer", trained).fingerprint == expected.fingerprint


def test_text_with_few_merges_gives_a_smaller_vocabulary(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("aaaa aaaa")
    train_tokenizer.main(["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "t.json")])
    assert build_tokenizer("HFTokenizer", tmp_path / "t.json").vocab_size < 270
    assert "t.json: 26" in capsys.readouterr().out


def test_corpus_without_text_is_refused_and_nothing_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": " "}\n\n{}\n')
    output = tmp_path / "t.json"
    with pytest.raises(DataError, match="no document has text under 'text'"):
        train_tokenizer.main(["--input", str(tmp_path / "a.jsonl"), "--output", str(output)])
    assert not output.exists()


def test_size_without_room_for_the_bytes_is_refused(corpus, tmp_path):
    with pytest.raises(ConfigError, match="256 is too small: 257"):
        train_tokenizer.main(["--input", str(corpus), "--output", str(tmp_path / "t.json"), "--vocab-size", "256"])


def test_bad_line_is_named_without_traceback(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": \n')
    done = run_script("train_tokenizer.py", "--input", path, "--output", tmp_path / "t.json")
    assert_refused(done, f"'{path}' line 2 is not JSON")
    assert not (tmp_path / "t.json").exists()
