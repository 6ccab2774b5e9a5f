"""Tokenizers that the `tokenizers` library runs: any of its JSON files, and GPT-2's vocabulary with merges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.tokenizer.interface import EOD_TOKENS, fingerprint_of, well_formed
from megatron.tokenizer.vocab_files import checked_file, refuse_malformed, refuse_without_eod

if TYPE_CHECKING:
    import tokenizers

JSON_FILE = "a JSON file of the tokenizers library (tokenizer.json)"
VOCAB_FILE = "a GPT-2 vocabulary (vocab.json: one object of token to id)"
MERGE_FILE = "the merges of a GPT-2 vocabulary (merges.txt)"


class BytePairTokenizer:
    """One of the `tokenizers` library's tokenizers. Raises DataError when `source` has no end-of-document token."""

    def __init__(self, name: str, backend: tokenizers.Tokenizer, source: Path) -> None:
        self.name = name
        self._backend = backend
        # A file saved by a fine-tuning script may ask for both; documents are never cut or filled up.
        backend.no_truncation()
        backend.no_padding()
        vocab = backend.get_vocab(with_added_tokens=True)
        eod_token = next((token for token in EOD_TOKENS if token in vocab), None)
        if eod_token is None:
            refuse_without_eod(source, EOD_TOKENS)
        self.eod = vocab[eod_token]
        self.vocab_size = max(vocab.values()) + 1

    fingerprint = cached_property(fingerprint_of)

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text, without what a post-processor of the file would put around it."""
        return self._backend.encode(well_formed(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens written out."""
        return self._backend.decode(list(ids), skip_special_tokens=False)


def from_json(name: str, path: str | Path) -> BytePairTokenizer:
    """Read a tokenizers JSON file. Raises DataError when it is missing, empty, malformed or has no end of document."""
    import tokenizers

    file = checked_file(path, JSON_FILE)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for whatever it cannot read
        refuse_malformed(file, JSON_FILE, error)
    return BytePairTokenizer(name, backend, file)


def from_vocab_and_merges(name: str, vocab_path: str | Path, merge_path: str | Path) -> BytePairTokenizer:
    """Read GPT-2's two files. Raises DataError when one is missing, empty, malformed or has no end of document."""
    import tokenizers

    vocab_file, merge_file = checked_file(vocab_path, VOCAB_FILE), checked_file(merge_path, MERGE_FILE)
    try:
        vocab, merges = tokenizers.models.BPE.read_file(str(vocab_file), str(merge_file))
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    except Exception as error:  # as above
        refuse_malformed(vocab_file, f"{VOCAB_FILE} that fits the merges in '{merge_file}'", error)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    # Only what is in the vocabulary already: adding a token to it would change the ids of the embedding.
    backend.add_special_tokens([token for token in EOD_TOKENS if token in vocab])
    return BytePairTokenizer(name, backend, vocab_file)


def from_gpt2_release(name: str, path: str | Path, merge_path: str | Path | None) -> BytePairTokenizer:
    """Read GPT-2 in any of its local forms: a folder, a tokenizers JSON file, or vocab.json with merges.txt.

    A folder is read by its tokenizer.json, else by its vocab.json and merges.txt. Raises DataError as the others do.
    """
    location = Path(path)
    if location.is_dir():
        if (location / "tokenizer.json").exists():
            return from_json(name, location / "tokenizer.json")
        return from_vocab_and_merges(name, location / "vocab.json", location / "merges.txt")
    if merge_path is not None:
        return from_vocab_and_merges(name, location, merge_path)
    return from_json(name, location)
