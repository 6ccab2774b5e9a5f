"""CharLevelTokenizer: a byte of UTF-8 is its own id."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from megatron.tokenizer.interface import fingerprint_of, well_formed


class CharLevelTokenizer:
    """GPT-NeoX's byte vocabulary: 512 ids, of which 0 ends a document, 1 is padding and text uses up to 255."""

    name = "CharLevelTokenizer"
    vocab_size = 512
    eod = 0
    pad = 1

    fingerprint = cached_property(fingerprint_of)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text. A NUL character in it reads as an end of document."""
        return list(well_formed(text).encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes; what is not UTF-8 gives U+FFFD, ids from 256 nothing."""
        return bytes(token for token in ids if 0 <= token < 256).decode(errors="replace")
