"""Reading one checkpoint: judged as a whole first, then tensors layer by layer."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpointing import durable
from megatron.checkpointing.manifest import (
    STATE_FILE,
    Manifest,
    layer_index,
    optimizer_file,
    random_file,
    weights_file,
)
from megatron.checkpointing.random_state import RandomState
from megatron.checkpointing.snapshot import RunState
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointReader:
    """A checkpoint whose files are all there with the sizes they were written with. Make one with `open_checkpoint`.

    Optimizer tensors are called `<parameter>/<state>`. Tensors are read to the CPU, one file open at a time.
    """

    directory: Path
    manifest: Manifest
    _file_names: frozenset[str] = field(repr=False)

    @property
    def layers(self) -> list[int]:
        """Indices of the layers with weights, lowest first."""
        prefix, suffix = "layer_", ".safetensors"
        found = (name for name in self._file_names if name.startswith(prefix))
        return sorted(int(name.removeprefix(prefix).removesuffix(suffix)) for name in found)

    @property
    def has_optimizer_state(self) -> bool:
        """Whether the run saved its optimizer."""
        return any(name.startswith("optimizer_layer_") for name in self._file_names)

    @property
    def random_ranks(self) -> list[int]:
        """Data ranks with a random state, lowest first."""
        return [rank for rank in range(self.manifest.parallel_sizes.dp) if random_file(rank) in self._file_names]

    @property
    def run_state(self) -> RunState:
        """The counters the run was saved with."""
        path = self.directory / STATE_FILE
        try:
            content = json.loads(path.read_bytes())
            return RunState(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def verify(self, layers: Collection[int] | None = None) -> None:
        """Compare checksums of what `layers` (None: all) need; CheckpointError names every file that differs."""
        wanted = self._file_names
        if layers is not None:
            other = set(self.layers) - set(layers)
            wanted = wanted - {name for layer in other for name in (weights_file(layer), optimizer_file(layer))}
        damaged = [
            entry.name
            for entry in self.manifest.files
            if entry.name in wanted and durable.file_checksum(self.directory / entry.name) != entry.checksum
        ]
        if damaged:
            raise CheckpointError(
                f"{self.directory} is damaged: {', '.join(damaged)} differ from what was written (checksum)"
            )

    def weight_shapes(self, layers: Collection[int] | None = None) -> dict[str, torch.Size]:
        """Shapes of the weights of `layers` (None: all) by parameter name."""
        return self._shapes(weights_file(layer) for layer in self._present(layers))

    def optimizer_shapes(self, layers: Collection[int] | None = None) -> dict[str, torch.Size]:
        """Shapes of the optimizer's tensors of `layers` (None: all) by `<parameter>/<state>`."""
        return self._shapes(optimizer_file(layer) for layer in self._present(layers))

    def weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The weights called `names`, in the order of their layers."""
        return self._tensors(names, weights_file)

    def optimizer_state(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's tensors called `names` (`<parameter>/<state>`), in the order of their layers."""
        return self._tensors(names, optimizer_file)

    def random_state(self, data_rank: int) -> RandomState | None:
        """The state saved for `data_rank`; for a rank the run did not have, one derived from the first saved state.

        None if the run saved no random state at all.
        """
        ranks = self.random_ranks
        if not ranks:
            return None
        if data_rank not in ranks:
            return self._read_random(ranks[0]).derived(data_rank)
        return self._read_random(data_rank)

    def _read_random(self, data_rank: int) -> RandomState:
        with self._open(random_file(data_rank)) as file:
            return RandomState.from_tensors({name: file.get_tensor(name).clone() for name in file.offset_keys()})

    def _present(self, layers: Collection[int] | None) -> list[int]:
        return [layer for layer in self.layers if layers is None or layer in layers]

    def _shapes(self, files: Iterable[str]) -> dict[str, torch.Size]:
        shapes: dict[str, torch.Size] = {}
        for name in files:
            if name in self._file_names:
                with self._open(name) as file:
                    shapes |= {key: torch.Size(file.get_slice(key).get_shape()) for key in file.offset_keys()}
        return shapes

    def _tensors(self, names: Iterable[str], file_of: Callable[[int], str]) -> Iterator[tuple[str, Tensor]]:
        by_layer: dict[int, list[str]] = {}
        for name in names:
            by_layer.setdefault(layer_index(name), []).append(name)
        for layer in sorted(by_layer):
            with self._open(file_of(layer)) as file:
                for name in by_layer[layer]:
                    yield name, file.get_tensor(name)

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        path = self.directory / name
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                yield file
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def open_checkpoint(directory: Path) -> CheckpointReader:
    """Read the manifest and look that every file is there, whole; CheckpointError names all that are not."""
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
    return CheckpointReader(directory, manifest, frozenset(entry.name for entry in manifest.files))
