"""Turn documents into token files: `<output-prefix>_<key>_document.bin`, `.idx` and `.meta.json` for each JSON key.

Documents without text (missing, null, empty, only spaces) are left out and counted. The files appear when all of them
are whole, the .idx last.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm

from megatron.data.indexed_format import dtype_for_vocab, index_path
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.tokenization_record import TokenizationRecord, write_record
from megatron.errors import DataError, run_main
from megatron.tokenizer import TOKENIZER_TYPES, Tokenizer
from tools.datasets.documents import find_inputs, raw_documents
from tools.datasets.encode import EncodedBatch, EncodedColumn, EncodeSettings, encode_documents


class TokenFiles:
    """The token files of one key while they are being written."""

    def __init__(self, prefix: str, tokenizer: Tokenizer) -> None:
        self.prefix = prefix
        self.writer = IndexedDatasetWriter(prefix, dtype_for_vocab(tokenizer.vocab_size))
        self.num_tokens = 0
        self.num_skipped = 0

    def add(self, column: EncodedColumn) -> None:
        """Append the documents of a batch."""
        start = 0
        for length in column.lengths:
            self.writer.add_document(column.ids[start : start + length])
            start += length
        self.num_tokens += start
        self.num_skipped += column.num_skipped

    def publish(self, tokenizer: Tokenizer, settings: EncodeSettings) -> None:
        """Give the files their names. Without an .idx there is no dataset, so it goes first and comes last."""
        index_path(self.prefix).unlink(missing_ok=True)
        record = TokenizationRecord(
            tokenizer_type=settings.tokenizer_type,
            vocab_file=settings.vocab_file,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            fingerprint=tokenizer.fingerprint,
            append_eod=settings.append_eod,
            num_documents=self.writer.num_documents,
            num_tokens=self.num_tokens,
            num_skipped=self.num_skipped,
        )
        write_record(self.prefix, record)
        self.writer.finalize()


def preprocess(files: Sequence[Path], output_prefix: str, settings: EncodeSettings, num_workers: int = 1) -> None:
    """Write the token files of all keys and print what they hold.

    Raises DataError for an input or vocabulary that cannot be used, or a key under which no document has text; then
    no file is written.
    """
    started = time.perf_counter()
    tokenizer = settings.build()
    with ExitStack() as undo:
        outputs = [TokenFiles(f"{output_prefix}_{key}_document", tokenizer) for key in settings.keys]
        for output in outputs:
            undo.callback(output.writer.discard)
        for batch in _with_progress(encode_documents(raw_documents(files), tokenizer, settings, num_workers), files):
            for output, column in zip(outputs, batch.columns, strict=True):
                output.add(column)
        for key, output in zip(settings.keys, outputs, strict=True):
            if not output.writer.num_documents:
                raise DataError(f"none of {output.num_skipped} documents has text under '{key}'; nothing was written")
        for output in outputs:
            output.publish(tokenizer, settings)
    elapsed_s = time.perf_counter() - started
    for output in outputs:
        print(
            f"{output.prefix}: {output.writer.num_documents:,} documents, {output.num_tokens:,} tokens "
            f"({output.writer.dtype}), {output.num_skipped:,} documents without text left out, {elapsed_s:.1f} s"
        )


def _with_progress(batches: Iterator[EncodedBatch], files: Sequence[Path]) -> Iterator[EncodedBatch]:
    """Yield the batches; a bar of the bytes read is shown on a terminal."""
    unpacked = not any(file.suffix == ".gz" or not file.is_file() for file in files)
    total_bytes = sum(file.stat().st_size for file in files) if unpacked else None
    with tqdm(total=total_bytes, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        for batch in batches:
            yield batch
            bar.update(batch.raw_bytes)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs, tokens, output = (parser.add_argument_group(title) for title in ("input", "tokenizer", "output"))
    inputs.add_argument(
        "--input", nargs="+", required=True, help="files or folders of .jsonl, .jsonl.gz or .txt; commas also separate"
    )
    inputs.add_argument(
        "--json-keys", "--jsonl-keys", nargs="+", default=["text"], help="where the text of a document is"
    )
    tokens.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    tokens.add_argument("--vocab-file", help="vocabulary, tokenizer or model file; an encoding's name for tiktoken")
    tokens.add_argument("--merge-file", help="merges, for the tokenizers that have them in a file of their own")
    tokens.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    output.add_argument("--output-prefix", required=True, help="path the output files begin with")
    output.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Write one set of token files."""
    parser = _arguments()
    options = parser.parse_args(argv)
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: at least one process tokenizes")
    if len(set(options.json_keys)) < len(options.json_keys):
        parser.error(f"--json-keys {' '.join(options.json_keys)}: a key is there twice")
    settings = EncodeSettings(
        options.tokenizer_type, options.vocab_file, options.merge_file, tuple(options.json_keys), options.append_eod
    )
    preprocess(find_inputs(options.input), options.output_prefix, settings, options.workers)


if __name__ == "__main__":
    run_main(main)
