"""Make a corpus of JSON lines from text that is on this machine already.

`--name stdlib` takes the standard library of the Python that runs this, one document a module. Any other name needs
`--input`: a folder, one document a text file, or a file, cut at blank lines into documents of 8 KiB and more.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data.atomic_file import atomic_file
from megatron.errors import ConfigError, DataError, run_main

# Installed packages and bytecode are no part of the library; tests repeat themselves; encodings are tables of numbers.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
)
MIN_DOCUMENT_BYTES = 8192


@dataclass(frozen=True)
class Document:
    """A text and where it comes from, relative to the root of the corpus."""

    path: str
    text: str


@dataclass(frozen=True)
class CorpusSize:
    """What a corpus has, and how many files were left out of it."""

    num_documents: int
    text_bytes: int
    num_duplicates: int
    num_undecodable: int


def stdlib_files(root: Path) -> Iterator[Path]:
    """Yield the modules under the root of a standard library, in the order of their paths."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def folder_files(root: Path) -> Iterator[Path]:
    """Yield all visible files under a folder, in the order of their paths."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def python_source(content: bytes) -> str:
    """Decode a module as Python does: by its byte order mark or coding line. Raises ValueError when that fails."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, LookupError) as error:
        raise ValueError(str(error)) from error


def utf8(content: bytes) -> str:
    """Decode UTF-8, with or without a byte order mark. Raises ValueError for anything else."""
    return content.decode("utf-8-sig")


def cut_documents(text: str) -> Iterator[str]:
    """Cut a text at blank lines into documents of at least MIN_DOCUMENT_BYTES; the last one may be shorter."""
    paragraphs: list[str] = []
    size_bytes = 0
    for paragraph in text.split("\n\n"):
        paragraphs.append(paragraph)
        size_bytes += len(paragraph.encode()) + 2
        if size_bytes >= MIN_DOCUMENT_BYTES:
            yield "\n\n".join(paragraphs)
            paragraphs, size_bytes = [], 0
    if paragraphs:
        yield "\n\n".join(paragraphs)


def documents_of(root: Path, files: Iterator[Path], decode: Callable[[bytes], str]) -> Iterator[Document | None]:
    """Yield one document a file, None for a file that cannot be decoded."""
    for file in files:
        text = _decoded(file, decode)
        yield None if text is None else Document(file.relative_to(root).as_posix(), text)


def _decoded(file: Path, decode: Callable[[bytes], str]) -> str | None:
    try:
        return decode(file.read_bytes())
    except ValueError:
        return None
    except OSError as error:
        raise DataError(f"'{file}' cannot be read: {error.strerror}") from error


def find_documents(name: str, source: Path | None) -> Iterator[Document | None]:
    """Yield the documents of a corpus. Raises ConfigError for a name without input, DataError for a bad input."""
    if name == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return documents_of(root, stdlib_files(root), python_source)
    if source is None:
        raise ConfigError(f"corpus '{name}' needs --input; only 'stdlib' is made without one")
    if source.is_dir():
        return documents_of(source, folder_files(source), utf8)
    try:
        text = utf8(source.read_bytes())
    except OSError as error:
        raise DataError(f"input '{source}' cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"input '{source}' is not UTF-8: {error}") from error
    return (Document(f"{source.name}#{index}", part) for index, part in enumerate(cut_documents(text)))


def write_corpus(documents: Iterator[Document | None], output: Path) -> CorpusSize:
    """Write the documents as JSON lines, leaving out empty ones and repetitions; the file appears when it is whole.

    Raises DataError when nothing is left to write.
    """
    seen: set[bytes] = set()
    num_duplicates = num_undecodable = text_bytes = 0
    with atomic_file(output) as stream:
        for document in documents:
            if document is None:
                num_undecodable += 1
                continue
            if not document.text.strip():
                continue
            content = document.text.encode()
            digest = hashlib.sha256(content).digest()
            if digest in seen:
                num_duplicates += 1
                continue
            seen.add(digest)
            text_bytes += len(content)
            line = json.dumps({"text": document.text, "meta": {"path": document.path}}, ensure_ascii=False)
            stream.write(line.encode() + b"\n")
        if not seen:
            raise DataError(f"no text found for '{output}' ({num_undecodable} files could not be decoded)")
    return CorpusSize(len(seen), text_bytes, num_duplicates, num_undecodable)


def main(argv: Sequence[str] | None = None) -> None:
    """Make one corpus and print what it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="'stdlib', or the name of the corpus made from --input")
    parser.add_argument("--input", type=Path, help="folder or text file, UTF-8")
    parser.add_argument("--output", type=Path, required=True, help="a .jsonl file, or a folder for <name>.jsonl")
    options = parser.parse_args(argv)
    output = options.output if options.output.suffix == ".jsonl" else options.output / f"{options.name}.jsonl"
    size = write_corpus(find_documents(options.name, options.input), output)
    print(
        f"{output}: {size.num_documents:,} documents, {size.text_bytes / 1e6:.1f} MB of text; left out "
        f"{size.num_duplicates} duplicates, {size.num_undecodable} files that could not be decoded"
    )


if __name__ == "__main__":
    run_main(main)
