"""SPMTokenizer: a model of the sentencepiece library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from megatron.tokenizer.interface import EOD_TOKENS, fingerprint_of, well_formed
from megatron.tokenizer.vocab_files import checked_file, refuse_malformed, refuse_without_eod

MODEL_FILE = "a sentencepiece model (.model)"


class SentencePieceTokenizer:
    """A sentencepiece model. It may normalize text, so that `decode` gives the normalized text.

    The end of a document is the first of the usual pieces that the model has, else its own end of sentence.
    Raises DataError when the file is missing, empty or malformed, or has neither.
    """

    name = "SPMTokenizer"

    def __init__(self, path: str | Path) -> None:
        import sentencepiece

        file = checked_file(path, MODEL_FILE)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
        except RuntimeError as error:
            refuse_malformed(file, MODEL_FILE, error)
        self.vocab_size: int = self._model.get_piece_size()
        pieces = {self._model.id_to_piece(token): token for token in range(self.vocab_size)}
        self.eod: int = next((pieces[token] for token in EOD_TOKENS if token in pieces), self._model.eos_id())
        if self.eod < 0:
            refuse_without_eod(file, EOD_TOKENS)

    fingerprint = cached_property(fingerprint_of)

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text."""
        return self._model.encode(well_formed(text), out_type=int)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; control pieces have none."""
        return self._model.decode([token for token in ids if 0 <= token < self.vocab_size])
