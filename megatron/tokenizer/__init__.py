"""Text to token ids and back, one interface for every tokenizer type."""

from megatron.tokenizer.build import TOKENIZER_TYPES, build_tokenizer
from megatron.tokenizer.interface import EOD_TOKENS, Tokenizer

__all__ = ["EOD_TOKENS", "TOKENIZER_TYPES", "Tokenizer", "build_tokenizer"]
