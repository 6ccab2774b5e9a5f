"""CharLevelTokenizer: bytes are ids."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.tokenizer import build_tokenizer

tokenizer = build_tokenizer("CharLevelTokenizer", None)


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_ids_are_the_bytes_and_come_back(text):
    assert bytes(tokenizer.encode(text)) == text.encode()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary_is_gpt_neoxs():
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (512, 0, 1)


def test_what_is_no_byte_or_no_utf8_does_not_stop_decoding():
    assert tokenizer.decode([300, 97, 511, 600, 0xE9]) == "a\ufffd"
    assert tokenizer.decode(tokenizer.encode("\udc80")) == "\ufffd"
