"""From the arguments `tokenizer_type`, `vocab_file` and `merge_file` to a tokenizer."""

from __future__ import annotations

from pathlib import Path

from megatron.errors import ConfigError
from megatron.tokenizer import byte_pair
from megatron.tokenizer.char_level import CharLevelTokenizer
from megatron.tokenizer.interface import Tokenizer
from megatron.tokenizer.sentence_piece import MODEL_FILE, SentencePieceTokenizer
from megatron.tokenizer.tiktoken_encoding import RANKS_FILE, TiktokenTokenizer

TOKENIZER_TYPES = (
    "HFTokenizer",
    "HFGPT2Tokenizer",
    "GPT2BPETokenizer",
    "SPMTokenizer",
    "CharLevelTokenizer",
    "TiktokenTokenizer",
)


def build_tokenizer(
    tokenizer_type: str, vocab_file: str | Path | None, merge_file: str | Path | None = None
) -> Tokenizer:
    """Return the tokenizer. Types that have no merges leave `merge_file` alone, CharLevelTokenizer both files.

    Raises ConfigError for an unknown type or an argument that is not set, DataError for a file that cannot be used.
    """
    if tokenizer_type == "HFTokenizer":
        return byte_pair.from_json(tokenizer_type, _needed(vocab_file, tokenizer_type, byte_pair.JSON_FILE))
    if tokenizer_type == "HFGPT2Tokenizer":
        expected = f"{byte_pair.JSON_FILE}, a local folder with one, or {byte_pair.VOCAB_FILE} with merge_file"
        return byte_pair.from_gpt2_release(tokenizer_type, _needed(vocab_file, tokenizer_type, expected), merge_file)
    if tokenizer_type == "GPT2BPETokenizer":
        vocab = _needed(vocab_file, tokenizer_type, byte_pair.VOCAB_FILE)
        merges = _needed(merge_file, tokenizer_type, byte_pair.MERGE_FILE, "merge_file")
        return byte_pair.from_vocab_and_merges(tokenizer_type, vocab, merges)
    if tokenizer_type == "SPMTokenizer":
        return SentencePieceTokenizer(_needed(vocab_file, tokenizer_type, MODEL_FILE))
    if tokenizer_type == "CharLevelTokenizer":
        return CharLevelTokenizer()
    if tokenizer_type == "TiktokenTokenizer":
        return TiktokenTokenizer(_needed(vocab_file, tokenizer_type, f"an encoding's name or {RANKS_FILE}"))
    raise ConfigError(f"unknown tokenizer_type '{tokenizer_type}'; known: {', '.join(TOKENIZER_TYPES)}")


def _needed(path: str | Path | None, tokenizer_type: str, expected: str, argument: str = "vocab_file") -> str | Path:
    if path is None or not str(path):
        raise ConfigError(f"tokenizer_type {tokenizer_type} needs {argument}: {expected}")
    return path
