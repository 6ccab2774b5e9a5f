"""TiktokenTokenizer from local files against encodings tiktoken builds from the same ranks, and without network."""

import pytest
import tiktoken
import tiktoken.load
import tiktoken.registry
import tiktoken_ext.openai_public

from megatron.errors import DataError
from megatron.tokenizer import build_tokenizer
from tests.tokenizer.conftest import sample_text
from tests.tokenizer.tiktoken_files import ranks_of, write_ranks

CODE = "a = 12345\n\n\tnaïve isn't\r\n"


@pytest.fixture
def cl100k(gpt2, tmp_path):
    """A small vocabulary under the name of a large encoding: its special tokens lie far behind a gap."""
    return write_ranks(ranks_of(gpt2.json), tmp_path / "cl100k_base.tiktoken")


def test_file_has_pattern_and_special_tokens_of_the_encoding_it_is_named_after(cl100k, monkeypatch):
    ranks = tiktoken.load.load_tiktoken_bpe(str(cl100k))
    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    reference = tiktoken.Encoding(**tiktoken_ext.openai_public.cl100k_base())
    tokenizer = build_tokenizer("TiktokenTokenizer", cl100k)
    for text in (CODE, sample_text(), "a<|endoftext|>b<|fim_prefix|>"):
        expected = reference.encode(text, allowed_special="all")
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text
    assert (tokenizer.vocab_size, tokenizer.eod) == (reference.n_vocab, reference.eot_token) == (100277, 100257)


def test_encoding_defined_by_another_one_uses_the_file_too(cl100k, tmp_path):
    path = cl100k.rename(tmp_path / "o200k_harmony.tiktoken")
    assert build_tokenizer("TiktokenTokenizer", path).eod == 199999


def test_ids_that_no_token_has_decode_to_nothing(cl100k):
    tokenizer = build_tokenizer("TiktokenTokenizer", cl100k)
    assert tokenizer.decode([50_000, *tokenizer.encode("a"), 100_256, 200_000]) == "a"
    assert len(tokenizer.fingerprint) == 64


def test_gpt2_from_a_file_equals_gpt2_from_json(real_gpt2, tmp_path):
    path = write_ranks(ranks_of(real_gpt2), tmp_path / "gpt2.tiktoken")
    ours, other = build_tokenizer("TiktokenTokenizer", path), build_tokenizer("HFTokenizer", real_gpt2)
    assert ours.encode(sample_text()) == other.encode(sample_text())
    assert ours.fingerprint == other.fingerprint


def test_lone_surrogate_becomes_the_replacement_character(cl100k):
    tokenizer = build_tokenizer("TiktokenTokenizer", cl100k)
    assert tokenizer.decode(tokenizer.encode("a\ud800")) == "a\ufffd"


def test_name_without_a_network_says_what_to_do(monkeypatch, tmp_path):
    def no_network(blobpath):
        raise ConnectionError(blobpath)

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.load, "read_file", no_network)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(DataError, match=r"no local copy of 'cl100k_base'.*TIKTOKEN_CACHE_DIR"):
        build_tokenizer("TiktokenTokenizer", "cl100k_base")


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(DataError, match=r"'cl1000k' is neither a file nor an encoding.*cl100k_base"):
        build_tokenizer("TiktokenTokenizer", "cl1000k")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cl100k_base.tiktoken", None, "does not exist"),
        ("cl100k_base.tiktoken", b"", "empty"),
        ("cl100k_base.tiktoken", b"no ranks here\n", "is not a .tiktoken file"),
        ("cl100k_base.tiktoken", b"YQ== 0\nYg== 5\n", "the 2 ranks are not 0 to 1"),
        ("gpt2.tiktoken", b"YQ== 0\nYg== 1\n", "is not a .tiktoken file .* of the encoding gpt2"),
        ("mine.tiktoken", b"YQ== 0\n", "name it after the encoding"),
    ],
)
def test_unusable_file_is_named(tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        build_tokenizer("TiktokenTokenizer", path)
    assert str(path) in str(caught.value)
