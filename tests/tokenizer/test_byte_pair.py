"""HFTokenizer, HFGPT2Tokenizer and GPT2BPETokenizer against tiktoken and transformers."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError, DataError
from megatron.tokenizer import build_tokenizer
from tests.tokenizer.conftest import sample_text
from tests.tokenizer.tiktoken_files import reference_encoding

any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


def every_form(gpt2):
    return [
        build_tokenizer("HFTokenizer", gpt2.json),
        build_tokenizer("HFGPT2Tokenizer", gpt2.json),
        build_tokenizer("HFGPT2Tokenizer", gpt2.folder),
        build_tokenizer("HFGPT2Tokenizer", gpt2.vocab, gpt2.merges),
        build_tokenizer("GPT2BPETokenizer", str(gpt2.vocab), str(gpt2.merges)),
    ]


@pytest.fixture(scope="module")
def forms(gpt2):
    return every_form(gpt2)


@pytest.fixture(scope="module")
def reference(gpt2):
    return reference_encoding(gpt2.json)


def test_ids_of_source_code_equal_tiktokens(forms, reference):
    expected = reference.encode_ordinary(sample_text())
    assert max(expected) > 400  # merges took part
    for tokenizer in forms:
        assert tokenizer.encode(sample_text()) == expected


@given(text=any_text)
@settings(max_examples=150, deadline=None)
def test_any_text_equals_tiktoken_and_comes_back(forms, reference, text):
    for tokenizer in forms:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, allowed_special="all")
        assert tokenizer.decode(ids) == text


def test_ids_equal_transformers(forms, gpt2):
    from transformers import GPT2TokenizerFast

    other = GPT2TokenizerFast.from_pretrained(gpt2.folder, local_files_only=True)
    text = "def f(x):\n\treturn  x\n<|endoftext|>naïve 🙂 isn't"
    for tokenizer in forms:
        assert tokenizer.encode(text) == other(text)["input_ids"]
        assert (tokenizer.vocab_size, tokenizer.eod) == (len(other), other.eos_token_id)


def test_spelled_out_special_token_becomes_its_id_and_comes_back(forms, reference):
    for tokenizer in forms:
        ids = tokenizer.encode("a<|endoftext|>b")
        assert ids[1] == tokenizer.eod == reference.eot_token
        assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_lone_surrogate_becomes_the_replacement_character(forms):
    for tokenizer in forms:
        assert tokenizer.decode(tokenizer.encode("a\ud800b\U0001f642")) == "a\ufffdb\U0001f642"


def test_ids_of_padding_decode_to_nothing(forms):
    for tokenizer in forms:
        first, *_ = tokenizer.encode("a")
        assert tokenizer.decode([tokenizer.vocab_size, first, tokenizer.vocab_size + 100]) == "a"


def test_gpt2_itself(real_gpt2):
    tokenizer, reference = build_tokenizer("HFTokenizer", real_gpt2), reference_encoding(real_gpt2)
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode(sample_text()) == reference.encode_ordinary(sample_text())


def test_names_are_the_types(forms):
    types = ["HFTokenizer", "HFGPT2Tokenizer", "HFGPT2Tokenizer", "HFGPT2Tokenizer", "GPT2BPETokenizer"]
    assert [tokenizer.name for tokenizer in forms] == types


def test_truncation_and_padding_of_the_file_are_not_applied(gpt2, tmp_path, forms):
    saved = tokenizers.Tokenizer.from_file(str(gpt2.json))
    saved.enable_truncation(4)
    saved.enable_padding(length=10)
    saved.save(str(tmp_path / "saved.json"))
    for text in ("a long enough text for four tokens", "a"):
        assert build_tokenizer("HFTokenizer", tmp_path / "saved.json").encode(text) == forms[0].encode(text)


def test_post_processor_of_the_file_adds_no_tokens(gpt2, tmp_path, forms):
    saved = tokenizers.Tokenizer.from_file(str(gpt2.json))
    eod = saved.token_to_id("<|endoftext|>")
    saved.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", eod)]
    )
    saved.save(str(tmp_path / "saved.json"))
    assert saved.encode("text").ids[0] == eod
    assert build_tokenizer("HFTokenizer", tmp_path / "saved.json").encode("text") == forms[0].encode("text")


def word_level(path, vocab):
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a")).save(str(path))
    return path


@pytest.mark.parametrize(
    ("vocab", "eod"),
    [
        ({"a": 0, "</s>": 1, "<|endoftext|>": 2}, 2),
        ({"a": 0, "<eos>": 1, "</s>": 2}, 2),
        ({"a": 0, "<eos>": 1}, 1),
    ],
)
def test_end_of_document_is_the_first_known_token(tmp_path, vocab, eod):
    assert build_tokenizer("HFTokenizer", word_level(tmp_path / "t.json", vocab)).eod == eod


def test_vocab_size_covers_the_largest_id_of_a_vocabulary_with_gaps(tmp_path):
    path = word_level(tmp_path / "t.json", {"a": 0, "</s>": 1, "b": 70_000})
    assert build_tokenizer("HFTokenizer", path).vocab_size == 70_001


def refused(kind, *paths):
    with pytest.raises(DataError) as caught:
        build_tokenizer(kind, *paths)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["HFTokenizer", "HFGPT2Tokenizer"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        (b"", "empty (0 bytes)"),
        (b"{}", "is not a JSON file of the tokenizers library"),
        (b'{"a": 0, "<|endoftext|>": 1}', "is not a JSON file of the tokenizers library"),
        (b"\x00\xff\xfe", "is not a JSON file of the tokenizers library"),
    ],
)
def test_unusable_json_file_is_named(tmp_path, kind, content, said):
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    message = refused(kind, path)
    assert said in message
    assert str(path) in message


@pytest.mark.parametrize("broken", ["vocab", "merges"])
@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "does not exist"), (b"", "empty (0 bytes)"), (b"\xff\xfe not text", "is not a GPT-2 vocabulary")],
)
def test_unusable_vocabulary_or_merges_are_named(gpt2, tmp_path, broken, content, said):
    path = tmp_path / broken
    if content is not None:
        path.write_bytes(content)
    paths = (path, gpt2.merges) if broken == "vocab" else (gpt2.vocab, path)
    message = refused("GPT2BPETokenizer", *paths)
    assert said in message
    assert str(path) in message


def test_merges_of_another_vocabulary_are_refused(gpt2, tmp_path):
    merges = tmp_path / "merges.txt"
    merges.write_text("#version: 0.2\nq z\n")
    assert str(merges) in refused("GPT2BPETokenizer", gpt2.vocab, merges)


def test_vocabulary_without_end_of_document_is_refused(gpt2, tmp_path):
    vocab = json.loads(gpt2.vocab.read_text())
    del vocab["<|endoftext|>"]
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(vocab))
    for message in (
        refused("GPT2BPETokenizer", path, gpt2.merges),
        refused("HFTokenizer", word_level(tmp_path / "t.json", {"a": 0})),
    ):
        assert "no end-of-document token; expected one of <|endoftext|>, </s>" in message


def test_folder_is_taken_by_hfgpt2_only(gpt2, tmp_path):
    assert "is a folder" in refused("HFTokenizer", gpt2.folder)
    assert str(tmp_path / "vocab.json") in refused("HFGPT2Tokenizer", tmp_path)


@pytest.mark.parametrize(
    ("kind", "vocab", "said"),
    [
        ("HFTokenizer", None, "needs vocab_file"),
        ("HFGPT2Tokenizer", "", "needs vocab_file"),
        ("GPT2BPETokenizer", "vocab.json", "needs merge_file"),
        ("SPMTokenizer", None, "needs vocab_file"),
        ("TiktokenTokenizer", None, "needs vocab_file"),
        ("BertTokenizer", "vocab.txt", "known: HFTokenizer"),
    ],
)
def test_missing_arguments_are_refused(kind, vocab, said):
    with pytest.raises(ConfigError, match=said):
        build_tokenizer(kind, vocab)
