"""TiktokenTokenizer: an encoding of the tiktoken library, by name or from a local .tiktoken file."""

from __future__ import annotations

import types
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import DataError
from megatron.tokenizer.interface import fingerprint_of, well_formed
from megatron.tokenizer.vocab_files import checked_file, refuse_malformed, refuse_without_eod

if TYPE_CHECKING:
    import tiktoken

RANKS_FILE = "a .tiktoken file (a line a token: base64 and rank)"


class TiktokenTokenizer:
    """A tiktoken encoding. `vocab_file` is the name of one, or a file `<name>.tiktoken`.

    A file holds ranks only, so its name says whose pattern and special tokens go with them. A name alone is looked up
    in tiktoken's own cache (TIKTOKEN_CACHE_DIR) and else fetched by tiktoken. Raises DataError when there is no such
    encoding, the file is missing, empty or malformed, the encoding cannot be had, or it has no end-of-document token.
    """

    name = "TiktokenTokenizer"

    def __init__(self, vocab_file: str | Path) -> None:
        source = str(vocab_file)
        is_file = source.endswith(".tiktoken") or Path(source).exists()
        self._encoding = _from_file(Path(source)) if is_file else _by_name(source)
        if self._encoding.eot_token is None:
            refuse_without_eod(source, ("<|endoftext|>",))
        self.eod: int = self._encoding.eot_token
        self.vocab_size: int = self._encoding.n_vocab

    fingerprint = cached_property(fingerprint_of)

    @cached_property
    def _unused(self) -> set[int]:
        """Ids below the vocabulary size that no token has; some encodings leave such gaps."""
        special = {self._encoding.encode_single_token(token) for token in self._encoding.special_tokens_set}
        num_ranks = len(self._encoding.token_byte_values())
        return set(range(num_ranks, self.vocab_size)) - special

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text."""
        return self._encoding.encode(well_formed(text), allowed_special="all")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens written out."""
        known = [token for token in ids if 0 <= token < self.vocab_size and token not in self._unused]
        return self._encoding.decode(known)


def _by_name(name: str) -> tiktoken.Encoding:
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        known = ", ".join(tiktoken.list_encoding_names())
        raise DataError(f"vocab_file '{name}' is neither a file nor an encoding of tiktoken; it has {known}")
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # no network, no permission, a wrong hash: requests' and tiktoken's errors share no base
        raise DataError(
            f"tiktoken has no local copy of '{name}' and could not fetch one ({type(error).__name__}): set "
            f"TIKTOKEN_CACHE_DIR to a folder that has it, or vocab_file to a local {name}.tiktoken"
        ) from error


def _from_file(path: Path) -> tiktoken.Encoding:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS

    file = checked_file(path, RANKS_FILE)
    if file.stem not in ENCODING_CONSTRUCTORS:
        known = ", ".join(f"{name}.tiktoken" for name in ENCODING_CONSTRUCTORS)
        raise DataError(f"'{file}' holds ranks only; name it after the encoding they belong to: one of {known}")
    try:
        ranks = load_tiktoken_bpe(str(file))
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError(f"the {len(ranks)} ranks are not 0 to {len(ranks) - 1}")
        return tiktoken.Encoding(**_definition(ENCODING_CONSTRUCTORS[file.stem], ranks))
    except (ValueError, AssertionError, KeyError) as error:
        refuse_malformed(file, f"{RANKS_FILE} of the encoding {file.stem}", error)


def _definition(constructor: types.FunctionType, ranks: dict[bytes, int]) -> dict[str, Any]:
    """Return what the constructor of an encoding says, with these ranks instead of ranks it would download.

    tiktoken keeps patterns and special tokens only inside functions that also fetch the ranks; a copy of the function
    with other global names leaves tiktoken itself as it is.
    """
    loaders = {name: lambda *_, **__: ranks for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks")}
    scope = {**constructor.__globals__, **loaders}
    for name, value in constructor.__globals__.items():
        if isinstance(value, types.FunctionType) and value.__module__ == constructor.__module__:
            scope[name] = types.FunctionType(value.__code__, scope, name)
    return types.FunctionType(constructor.__code__, scope)()
