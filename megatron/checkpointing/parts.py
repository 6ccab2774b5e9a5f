"""The files one rank writes: which elements go into which, and their content."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

import safetensors.torch
from torch import Tensor

from megatron.checkpointing.file_names import STATE_FILE, Content, layer_file, layer_index
from megatron.checkpointing.holding import Holding, random_file
from megatron.checkpointing.inventory import Piece, SavedParameter
from megatron.checkpointing.role import SaveRole
from megatron.checkpointing.snapshot import Snapshot


@dataclass(frozen=True)
class FileParts:
    """A file before it is written: tensors by the names they have in it, and the elements they are."""

    name: str
    tensors: Mapping[str, Tensor]
    pieces: Mapping[str, Piece] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The file's content, the same bytes for the same tensors."""
        # The format of the values is named in the header because transformers asks for it. No more than that one key:
        # the library writes several in any order.
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        return safetensors.torch.save(on_cpu, metadata={"format": "pt"})


def tensor_files(snapshot: Snapshot, role: SaveRole) -> Iterator[FileParts]:
    """The files of tensors that `role` writes, one at a time."""
    if "weights" in role.writes:
        yield from _weight_files(snapshot)
    if "optimizer_state" in role.writes:
        yield from _optimizer_files(snapshot)
    if "random_state" in role.writes and snapshot.random_state is not None:
        yield FileParts(random_file(snapshot.holding.position), snapshot.random_state.to_tensors())


def run_state_file(snapshot: Snapshot) -> tuple[str, bytes]:
    """Name and content of the file with the run's counters."""
    return STATE_FILE, (json.dumps(asdict(snapshot.run_state), indent=1) + "\n").encode()


def saved_parameters(snapshot: Snapshot) -> dict[str, SavedParameter]:
    """What this rank knows of the parameters it holds a part of; raises ValueError for state of a wrong size."""
    state = snapshot.optimizer_state or {}
    return {
        name: _saved_parameter(name, weight, state.get(name, {}), snapshot.holding)
        for name, weight in snapshot.weights.items()
    }


def state_names(name: str, tensors: Mapping[str, Tensor], numel: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a parameter's state tensors with `numel` elements each and of its counters, both sorted.

    Raises ValueError for a tensor that is neither.
    """
    counters = [key for key, tensor in tensors.items() if tensor.dim() == 0]
    for key, tensor in tensors.items():
        if key not in counters and tensor.numel() != numel:
            raise ValueError(f"optimizer state {name}/{key} has {tensor.numel()} elements instead of {numel}")
    return tuple(sorted(tensors.keys() - counters)), tuple(sorted(counters))


def _saved_parameter(name: str, weight: Tensor, state: Mapping[str, Tensor], holding: Holding) -> SavedParameter:
    piece = holding.state_piece(name, weight)
    return SavedParameter(holding.layout(name, weight), *state_names(name, state, piece.numel))


def _weight_files(snapshot: Snapshot) -> Iterator[FileParts]:
    holding = snapshot.holding
    own = [name for name in snapshot.weights if holding.owns(name) and holding.is_first_with(name)]
    for layer, names in _by_layer(own).items():
        weights = {name: snapshot.weights[name] for name in names}
        pieces = {name: holding.weight_piece(name, weight) for name, weight in weights.items()}
        yield FileParts(_file_name("weights", layer, snapshot), weights, pieces)


def _optimizer_files(snapshot: Snapshot) -> Iterator[FileParts]:
    holding, state = snapshot.holding, snapshot.optimizer_state
    if state is None:
        return
    pieces = {name: holding.state_piece(name, snapshot.weights[name]) for name in state}
    own = [name for name in state if _writes_state(name, pieces[name], holding)]
    for layer, names in _by_layer(own).items():
        tensors = {f"{name}/{key}": tensor for name in names for key, tensor in state[name].items()}
        yield FileParts(_file_name("optimizer", layer, snapshot), tensors, {name: pieces[name] for name in names})


def _writes_state(name: str, piece: Piece, holding: Holding) -> bool:
    if not holding.is_first_with_state(name):
        return False
    if holding.shards is None:
        return holding.owns(name)
    # A borrowed weight's gradient is reduced over both stages, and the state is dealt out to the ranks of both.
    return piece.numel > 0


def _file_name(content: Content, layer: int, snapshot: Snapshot) -> str:
    holding, position = snapshot.holding, snapshot.holding.position
    is_borrowed = holding.layers is not None and layer not in holding.layers
    parts = position.stage_part if is_borrowed else ""
    parts += position.tensor_part
    if content == "optimizer" and holding.shards is not None:
        parts += position.data_part
    return layer_file(content, layer, parts)


def _by_layer(names: list[str]) -> dict[int, list[str]]:
    layers: dict[int, list[str]] = {}
    for name in names:
        layers.setdefault(layer_index(name), []).append(name)
    return dict(sorted(layers.items()))
