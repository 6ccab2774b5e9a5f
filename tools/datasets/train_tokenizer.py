"""Train a byte-level BPE on documents and write it as a JSON file that tokenizer_type HFTokenizer reads.

The same documents give the same file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data.atomic_file import atomic_file
from megatron.errors import ConfigError, DataError, run_main
from megatron.tokenizer import EOD_TOKENS
from megatron.tokenizer.interface import well_formed
from tools.datasets.documents import find_inputs, raw_documents, texts_of

if TYPE_CHECKING:
    import tokenizers

EOD = EOD_TOKENS[0]
MIN_VOCAB_SIZE = 256 + 1  # every byte, and the end of a document


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Return a byte-level BPE of at most `vocab_size` entries, fewer when the texts have no more to merge.

    Id 0 is the end-of-document token, then come the 256 bytes, then the merges. Raises ConfigError for a size that does
    not hold these.
    """
    import tokenizers

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"vocabulary size {vocab_size} is too small: {MIN_VOCAB_SIZE} hold the bytes and {EOD}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def texts(files: Sequence[Path], key: str) -> Iterator[str]:
    """Yield the texts under a key. Raises DataError as the documents do, or when no document has any."""
    num_texts = 0
    for document in raw_documents(files):
        (text,) = texts_of(document, [key])
        if text and text.strip():
            num_texts += 1
            yield well_formed(text)
    if not num_texts:
        raise DataError(f"no document has text under '{key}' in {', '.join(map(str, files))}")


def main(argv: Sequence[str] | None = None) -> None:
    """Train one tokenizer and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, help="files or folders of .jsonl, .jsonl.gz or .txt")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--vocab-size", type=int, default=8192, help="entries, bytes and end of document included")
    parser.add_argument("--json-key", default="text", help="where the text of a document is")
    options = parser.parse_args(argv)
    started = time.perf_counter()
    tokenizer = train_tokenizer(texts(find_inputs(options.input), options.json_key), options.vocab_size)
    with atomic_file(options.output) as stream:
        stream.write(tokenizer.to_str(pretty=True).encode())
    print(f"{options.output}: {tokenizer.get_vocab_size():,} entries, {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    run_main(main)
