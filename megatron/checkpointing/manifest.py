"""`manifest.json`: what a checkpoint consists of, so that it can be judged before a byte of it is used."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch

from megatron.checkpointing import durable
from megatron.checkpointing.file_names import CONTENTS, MANIFEST_FILE, Content, content_of
from megatron.checkpointing.holding import ParallelSizes
from megatron.checkpointing.inventory import FoundPiece, Piece, SavedParameter, describe_gaps
from megatron.checkpointing.snapshot import ModelValues
from megatron.errors import CheckpointError

FORMAT_VERSION = 2


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint as it was written, and which elements of which parameters are in it."""

    name: str
    size_bytes: int
    checksum: str
    pieces: Mapping[str, Piece] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, content: bytes, pieces: Mapping[str, Piece]) -> "FileEntry":
        """The entry for a file `name` that holds `content`."""
        return cls(name, len(content), durable.checksum(content), pieces)

    def to_json(self) -> dict[str, Any]:
        """The entry as it is in the manifest: a piece is `[slice_index, start, stop]`."""
        pieces = {name: piece.to_json() for name, piece in self.pieces.items()}
        return {"name": self.name, "size_bytes": self.size_bytes, "checksum": self.checksum, "pieces": pieces}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "FileEntry":
        """Inverse of `to_json`; an entry of format version 1 has no pieces."""
        pieces = {name: Piece(*piece) for name, piece in content.get("pieces", {}).items()}
        return cls(content["name"], content["size_bytes"], content["checksum"], pieces)


def library_versions() -> dict[str, str]:
    """Versions a reader of an old checkpoint may want to know."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
    }


@dataclass(frozen=True)
class Manifest:
    """Everything known about a checkpoint without opening its other files."""

    iteration: int
    files: tuple[FileEntry, ...]
    model: ModelValues
    parallel_sizes: ParallelSizes
    parameters: Mapping[str, SavedParameter] = field(default_factory=dict)
    bucket_plan: tuple[tuple[str, ...], ...] | None = None
    libraries: Mapping[str, str] = field(default_factory=library_versions)
    format_version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The file's content: indented JSON that carries its own checksum."""
        content = asdict(self) | {"files": [entry.to_json() for entry in self.files]}
        return _encode({"checksum": durable.checksum(_encode(content)), **content})

    def pieces(self, content: Content) -> dict[str, list[FoundPiece]]:
        """Which file holds which elements of a parameter's weights or optimizer state, by the parameter's name."""
        found: dict[str, list[FoundPiece]] = {}
        for entry in self.files:
            if content_of(entry.name) == content:
                for name, piece in entry.pieces.items():
                    found.setdefault(name, []).append(FoundPiece(entry.name, piece))
        return found

    def gaps(self) -> str:
        """Elements that no file holds, although some file holds others of the same parameter; empty if none."""
        return "; ".join(
            f"{content}: {gaps}"
            for content in CONTENTS
            if (gaps := describe_gaps(self.pieces(content), self.parameters))
        )

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read `directory/manifest.json`; CheckpointError when it is missing, damaged or of a newer format."""
        path = directory / MANIFEST_FILE
        try:
            content = json.loads(path.read_bytes())
            version = content["format_version"]
            if version > FORMAT_VERSION:
                raise CheckpointError(
                    f"{path} has format version {version}; this version of the trainer reads up to {FORMAT_VERSION}"
                )
            if content.pop("checksum") != durable.checksum(_encode(content)):
                raise CheckpointError(f"{path} is damaged: its content does not match its own checksum")
            return cls._from_json(content)
        except FileNotFoundError:
            raise CheckpointError(_no_manifest(path)) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_json(cls, content: dict[str, Any]) -> "Manifest":
        plan = content["bucket_plan"]
        return cls(
            iteration=content["iteration"],
            files=tuple(map(FileEntry.from_json, content["files"])),
            model=content["model"],
            parallel_sizes=ParallelSizes(**content["parallel_sizes"]),
            parameters={
                name: SavedParameter.from_json(parameter) for name, parameter in content.get("parameters", {}).items()
            },
            bucket_plan=None if plan is None else tuple(tuple(bucket) for bucket in plan),
            libraries=content["libraries"],
            format_version=content["format_version"],
        )


def _encode(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _no_manifest(path: Path) -> str:
    directory = path.parent
    if not directory.is_dir():
        return f"checkpoint {directory} does not exist"
    if any(directory.glob("*.pt")):
        return f"{directory} has no {path.name}: its .pt files were written by another trainer, convert them first"
    return f"{directory} has no {path.name}: it is not a complete checkpoint"
