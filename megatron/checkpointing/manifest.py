"""`manifest.json`: what a checkpoint consists of, so that it can be judged before a byte of it is used."""

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch

from megatron.checkpointing import durable
from megatron.checkpointing.snapshot import ModelValues, ParallelSizes
from megatron.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"

_LAYER_OF_PARAMETER = re.compile(r"layers\.(\d+)\.")


def layer_index(parameter: str) -> int:
    """Index of the layer a parameter belongs to; ValueError unless its name is `layers.<index>.<...>`."""
    match = _LAYER_OF_PARAMETER.match(parameter)
    if match is None:
        raise ValueError(f"parameter name {parameter!r} does not begin with 'layers.<index>.'")
    return int(match.group(1))


def weights_file(layer: int) -> str:
    """Name of the file with the weights of layer `layer`."""
    return f"layer_{layer:03d}.safetensors"


def optimizer_file(layer: int) -> str:
    """Name of the file with the optimizer state of layer `layer`."""
    return f"optimizer_layer_{layer:03d}.safetensors"


def random_file(data_rank: int) -> str:
    """Name of the file with the random state of data rank `data_rank`."""
    return f"random_rank_{data_rank:03d}.safetensors"


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint as it was written."""

    name: str
    size_bytes: int
    checksum: str

    @classmethod
    def of(cls, name: str, content: bytes) -> "FileEntry":
        """The entry for a file `name` that holds `content`."""
        return cls(name, len(content), durable.checksum(content))


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
    bucket_plan: tuple[tuple[str, ...], ...] | None = None
    libraries: Mapping[str, str] = field(default_factory=library_versions)
    format_version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The file's content: indented JSON that carries its own checksum."""
        content = asdict(self)
        return _encode({"checksum": durable.checksum(_encode(content)), **content})

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
            files=tuple(FileEntry(**entry) for entry in content["files"]),
            model=content["model"],
            parallel_sizes=ParallelSizes(**content["parallel_sizes"]),
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
