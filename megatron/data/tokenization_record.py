"""Which tokenizer made a dataset: written next to its .bin and .idx, compared when training opens them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.data.atomic_file import atomic_file
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizationRecord:
    """How the documents of `<prefix>.bin` became token ids, and how many there are."""

    tokenizer_type: str
    vocab_file: str | None
    vocab_size: int
    eod: int
    fingerprint: str
    append_eod: bool
    num_documents: int
    num_tokens: int
    num_skipped: int


def record_path(prefix: str | Path) -> Path:
    """Return the file of the record of the dataset `<prefix>.bin`, `<prefix>.idx`."""
    return Path(f"{prefix}.meta.json")


def write_record(prefix: str | Path, record: TokenizationRecord) -> None:
    """Write the record of a dataset, whole or not at all."""
    with atomic_file(record_path(prefix)) as stream:
        stream.write((json.dumps(asdict(record), indent=2) + "\n").encode())


def read_record(prefix: str | Path) -> TokenizationRecord | None:
    """Return the record of a dataset, None when it has none. Raises DataError when it cannot be understood."""
    path = record_path(prefix)
    try:
        return TokenizationRecord(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"'{path}' is not a record of how the data was tokenized: {error}; preprocess again") from error


def check_tokenizer(prefix: str | Path, tokenizer: Tokenizer) -> bool:
    """Compare a dataset's tokenizer with this one. Return False when the dataset has no record, True when they agree.

    Datasets that other programs wrote have no record. Raises DataError when the two give different ids.
    """
    record = read_record(prefix)
    if record is None:
        return False
    if record.fingerprint == tokenizer.fingerprint:
        return True
    made_with = _described(record.tokenizer_type, record.vocab_size, record.eod, record.fingerprint)
    given = _described(tokenizer.name, tokenizer.vocab_size, tokenizer.eod, tokenizer.fingerprint)
    source = f" from '{record.vocab_file}'" if record.vocab_file else ""
    raise DataError(
        f"'{prefix}' was tokenized with {made_with}{source}, but the tokenizer given is {given}: the same ids would "
        "mean other text. Set tokenizer_type, vocab_file and merge_file to those of the data, or preprocess it again"
    )


def _described(name: str, vocab_size: int, eod: int, fingerprint: str) -> str:
    return f"{name} (vocabulary {vocab_size}, end of document {eod}, fingerprint {fingerprint[:12]})"
