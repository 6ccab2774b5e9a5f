"""Documents of the input files: JSON lines, plain or gzipped, and plain text."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron.errors import DataError

TEXT_SUFFIXES = (".txt",)
JSON_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
SUFFIXES = JSON_SUFFIXES + TEXT_SUFFIXES


@dataclass(frozen=True)
class RawDocument:
    """A document as it lies in its file: a line of JSON, or a whole text file."""

    file: Path
    line: int | None  # from 1; None when the document is the whole file
    content: bytes

    @property
    def place(self) -> str:
        """Where a message says it is."""
        return f"'{self.file}'" if self.line is None else f"'{self.file}' line {self.line}"


def find_inputs(inputs: Sequence[str]) -> list[Path]:
    """Return the files that the arguments name; each is a file, a folder, or several of them with commas between.

    A folder stands for the files of a known suffix in it, by name. Raises DataError for what is missing, of an unknown
    suffix, or a folder without such files.
    """
    return [file for entry in inputs for path in entry.split(",") if path for file in _files_of(Path(path))]


def _files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"input '{path}' does not exist")
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if not found:
            raise DataError(f"input folder '{path}' has no file that ends in {', '.join(SUFFIXES)}")
        return found
    if path.is_file() and not path.name.endswith(SUFFIXES):
        hint = " (unpack it first, or pipe it in: zstd -dc FILE | ... --input /dev/stdin)"
        raise DataError(
            f"input '{path}' does not end in one of {', '.join(SUFFIXES)}{hint if path.suffix == '.zst' else ''}"
        )
    return [path]  # what is no regular file, as /dev/stdin, is read as JSON lines


def raw_documents(files: Sequence[Path]) -> Iterator[RawDocument]:
    """Yield the documents in order. Lines without any character but spaces are no documents.

    Raises DataError when a file cannot be read.
    """
    for file in files:
        try:
            if file.name.endswith(TEXT_SUFFIXES):
                yield RawDocument(file, None, file.read_bytes())
                continue
            with _opened(file) as stream:
                for line, content in enumerate(stream, start=1):
                    if not content.isspace():
                        yield RawDocument(file, line, content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"input '{file}' cannot be read: {error}") from error


def _opened(file: Path) -> BinaryIO:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")  # type: ignore[return-value]


def texts_of(document: RawDocument, keys: Sequence[str]) -> list[str | None]:
    """Return the text under each key of a JSON document, None where it is missing or null.

    A text file has its content under every key. Raises DataError when it is not UTF-8, no JSON object, or has something
    other than text under a key.
    """
    try:
        decoded = document.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{document.place} is not UTF-8: {error.reason} at byte {error.start}") from error
    if document.line is None:
        return [decoded for _ in keys]
    try:
        value = json.loads(decoded)
    except ValueError as error:
        raise DataError(f"{document.place} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{document.place} is not a JSON object but a {type(value).__name__}")
    return [_text_under(key, value.get(key), document) for key in keys]


def _text_under(key: str, value: object, document: RawDocument) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise DataError(f"{document.place} has {type(value).__name__} under '{key}'; expected text or null")
