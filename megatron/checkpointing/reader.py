"""Reading one checkpoint: judged as a whole first, then runs of elements from the files that hold them."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.checkpointing import durable, version_1
from megatron.checkpointing.file_names import CONTENTS, STATE_FILE, Content, content_of
from megatron.checkpointing.holding import GridPosition, random_file
from megatron.checkpointing.inventory import FoundPiece
from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.open_files import OpenFiles
from megatron.checkpointing.random_state import RandomState
from megatron.checkpointing.snapshot import RunState
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class RandomSource:
    """A file with a random state and the rank that saved it."""

    file: str
    saved_by: GridPosition


@dataclass(frozen=True)
class CheckpointReader:
    """A checkpoint whose files are all there with the sizes they were written with. Make one with `open_checkpoint`.

    Optimizer tensors are called `<parameter>/<state>`. Tensors are read to the CPU.
    """

    directory: Path
    manifest: Manifest
    _pieces: dict[Content, dict[str, list[FoundPiece]]] = field(repr=False)

    @property
    def has_optimizer_state(self) -> bool:
        """Whether the run saved its optimizer."""
        return any(content_of(entry.name) == "optimizer" for entry in self.manifest.files)

    @property
    def run_state(self) -> RunState:
        """The counters the run was saved with."""
        path = self.directory / STATE_FILE
        try:
            content = json.loads(path.read_bytes())
            return RunState(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def pieces(self, content: Content, parameter: str) -> list[FoundPiece]:
        """Where the elements of a parameter's weights or optimizer state are."""
        return self._pieces[content].get(parameter, [])

    def verify(self, files: Collection[str] | None = None) -> None:
        """Compare checksums of `files` (None: all); CheckpointError names every one that differs."""
        damaged = [
            entry.name
            for entry in self.manifest.files
            if (files is None or entry.name in files)
            and durable.file_checksum(self.directory / entry.name) != entry.checksum
        ]
        if damaged:
            raise CheckpointError(
                f"{self.directory} is damaged: {', '.join(damaged)} differ from what was written (checksum)"
            )

    def random_source(self, position: GridPosition) -> RandomSource | None:
        """Whose random state to take for a rank: its own; else that of the first tensor rank beside it, which tensor
        ranks have in common; else that of the very first rank. None if none was saved.
        """
        names = {entry.name for entry in self.manifest.files}
        candidates = (position, replace(position, tensor_rank=0), GridPosition())
        for candidate in candidates:
            saved_by = replace(candidate, sizes=self.manifest.parallel_sizes)
            if saved_by.exists and random_file(saved_by) in names:
                return RandomSource(random_file(saved_by), saved_by)
        return None

    def random_state(self, source: RandomSource) -> RandomState:
        """The random state that `source` holds."""
        with OpenFiles(self.directory) as files:
            return RandomState.from_tensors(
                {name: files.tensor(source.file, name).clone() for name in files.names(source.file)}
            )


def open_checkpoint(directory: Path) -> CheckpointReader:
    """Read the manifest and look that all is there; CheckpointError names every file or part that is not."""
    manifest = Manifest.read(directory)
    faults = []
    for entry in manifest.files:
        path = directory / entry.name
        if not path.is_file():
            faults.append(f"{entry.name} is missing")
        elif path.stat().st_size != entry.size_bytes:
            faults.append(f"{entry.name} has {path.stat().st_size} bytes instead of {entry.size_bytes}")
    if faults:
        raise CheckpointError(f"{directory} is incomplete: {'; '.join(faults)}")
    if manifest.format_version == 1:
        manifest = version_1.with_inventory(manifest, directory)
    gaps = manifest.gaps()
    if gaps:
        raise CheckpointError(f"{directory} is incomplete: no file holds {gaps}")
    return CheckpointReader(directory, manifest, {content: manifest.pieces(content) for content in CONTENTS})
