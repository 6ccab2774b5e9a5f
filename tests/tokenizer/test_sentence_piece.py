"""SPMTokenizer against the library itself, on models trained here."""

import io

import pytest
import sentencepiece

from megatron.errors import DataError
from megatron.tokenizer import build_tokenizer
from tests.tokenizer.conftest import sample_text

LINE = "    def decode(self, s, _w=WHITESPACE.match):"


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    def trained(**options):
        model = io.BytesIO()
        lines = iter(sample_text().splitlines())
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, vocab_size=500, minloglevel=2, byte_fallback=True, **options
        )
        path = tmp_path_factory.mktemp("spm") / "some.model"
        path.write_bytes(model.getvalue())
        return path

    return trained


@pytest.fixture(scope="module")
def model(train):
    return train()


def test_ids_and_text_are_the_librarys(model):
    tokenizer, library = build_tokenizer("SPMTokenizer", model), sentencepiece.SentencePieceProcessor(str(model))
    for text in (LINE, "naïve 🙂 text", "", "a\ud800"):
        expected = library.encode(text.replace("\ud800", "\ufffd"))
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == library.decode(expected)
    assert tokenizer.vocab_size == 500
    assert tokenizer.eod == library.eos_id()


def test_ids_of_padding_decode_to_nothing(model):
    tokenizer = build_tokenizer("SPMTokenizer", model)
    assert tokenizer.decode([*tokenizer.encode("match"), 500, 600]) == "match"


def test_end_of_document_is_the_gpt2_token_where_the_model_has_it(train):
    path = train(user_defined_symbols=["<|endoftext|>"])
    library = sentencepiece.SentencePieceProcessor(str(path))
    assert build_tokenizer("SPMTokenizer", path).eod == library.piece_to_id("<|endoftext|>") != library.eos_id()


def test_end_of_sentence_of_another_name_ends_documents(train):
    path = train(eos_piece="[END]", eos_id=7)
    assert build_tokenizer("SPMTokenizer", path).eod == 7


def test_model_without_end_of_sentence_is_refused(train):
    with pytest.raises(DataError, match="no end-of-document token"):
        build_tokenizer("SPMTokenizer", train(eos_id=-1))


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "does not exist"), (b"", "empty"), (b"no model at all", "is not a sentencepiece model")],
)
def test_unusable_model_is_named(tmp_path, content, said):
    path = tmp_path / "some.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        build_tokenizer("SPMTokenizer", path)
    assert str(path) in str(caught.value)
