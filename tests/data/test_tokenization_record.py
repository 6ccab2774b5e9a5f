"""The tokenizer a dataset was made with, compared with the one at training."""

import pytest
import tokenizers

from megatron.data.tokenization_record import (
    TokenizationRecord,
    check_tokenizer,
    read_record,
    record_path,
    write_record,
)
from megatron.errors import DataError
from megatron.tokenizer import build_tokenizer


def record_of(tokenizer):
    return TokenizationRecord(
        tokenizer_type=tokenizer.name,
        vocab_file="some/vocab.json",
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        fingerprint=tokenizer.fingerprint,
        append_eod=True,
        num_documents=3,
        num_tokens=30,
        num_skipped=1,
    )


@pytest.fixture
def vocab_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(path))
    return path


def test_same_ids_pass_under_another_type(vocab_file, tmp_path):
    prefix = tmp_path / "data_text_document"
    write_record(prefix, record_of(build_tokenizer("HFTokenizer", vocab_file)))
    assert check_tokenizer(prefix, build_tokenizer("HFGPT2Tokenizer", vocab_file)) is True


def test_other_tokenizer_is_refused_with_both_in_the_message(vocab_file, tmp_path):
    prefix = tmp_path / "data_text_document"
    write_record(prefix, record_of(build_tokenizer("HFTokenizer", vocab_file)))
    with pytest.raises(DataError) as caught:
        check_tokenizer(prefix, build_tokenizer("CharLevelTokenizer", None))
    for part in (str(prefix), "HFTokenizer (vocabulary 3, end of document 2", "CharLevelTokenizer (vocabulary 512"):
        assert part in str(caught.value)
    assert "some/vocab.json" in str(caught.value)


def test_data_without_a_record_cannot_be_compared(tmp_path):
    assert check_tokenizer(tmp_path / "foreign", build_tokenizer("CharLevelTokenizer", None)) is False


def test_record_comes_back(tmp_path):
    record = record_of(build_tokenizer("CharLevelTokenizer", None))
    write_record(tmp_path / "x", record)
    assert read_record(tmp_path / "x") == record


@pytest.mark.parametrize("content", [b"", b"{", b'{"tokenizer_type": "HFTokenizer"}', b"[1]", b"\xff"])
def test_damaged_record_is_named(tmp_path, content):
    record_path(tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.meta\.json"):
        check_tokenizer(tmp_path / "x", build_tokenizer("CharLevelTokenizer", None))
