"""What every tokenizer offers, and how two tokenizers are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

# The end-of-document token of a vocabulary is the first of these it has.
EOD_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")

# Exercises what a vocabulary alone does not say: merge order, pre-tokenization, normalization, treatment of spaces.
_PROBE = (
    "The quick brown fox isn't lazy; they've 1234567 reasons (3.14159e-10).\n"
    "def f(x):\n\treturn  {'k': [x ** 2, None]}   # trailing spaces   \r\n\n\n"
    "Ångström naïve café — „quoted“ … \u00a0 e\u0301 ﬁ ①  Здравствуй мир こんにちは世界 안녕 مرحبا 🙂👩‍🚀\u200b end "
)


class Tokenizer(Protocol):
    """Text to token ids and back.

    `encode` adds nothing to the text: no token at its beginning or end. Text that spells a special token of the
    vocabulary becomes that token, wherever the library behind the tokenizer can do that.
    """

    @property
    def name(self) -> str:
        """The tokenizer type it was built as, `HFTokenizer` for example."""

    @property
    def vocab_size(self) -> int:
        """Number of rows an embedding needs for it, before any padding: the largest id + 1."""

    @property
    def eod(self) -> int:
        """Id of the end-of-document token."""

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers that give the same ids, see `fingerprint_of`."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text. A lone surrogate counts as U+FFFD."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids. An id that names no token, such as padding of the vocabulary, gives nothing."""


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """Return 64 hexadecimal digits for what the tokenizer does, whatever file or library it comes from.

    Covers the size of the vocabulary, the end-of-document token, the text of every id, and the ids of a fixed text.
    """
    digest = hashlib.sha256(f"{tokenizer.vocab_size} {tokenizer.eod}\n".encode())
    for token in range(tokenizer.vocab_size):
        digest.update(f"{token} {tokenizer.decode([token])!r}\n".encode())
    digest.update(repr(list(tokenizer.encode(_PROBE))).encode())
    return digest.hexdigest()


def well_formed(text: str) -> str:
    """Return the text with lone surrogates, which no UTF-8 has, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
