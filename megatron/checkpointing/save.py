"""Writing a checkpoint: every rank its parts, then one rank publishes the whole or nothing."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import safetensors.torch
from torch import Tensor

from megatron.checkpointing import catalog, durable
from megatron.checkpointing.catalog import Retention
from megatron.checkpointing.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    FileEntry,
    Manifest,
    layer_index,
    optimizer_file,
    random_file,
    weights_file,
)
from megatron.checkpointing.snapshot import Snapshot
from megatron.errors import CheckpointError

logger = logging.getLogger(__name__)

Part = Literal["weights", "optimizer_state", "random_state"]


@dataclass(frozen=True)
class SaveRole:
    """What one rank of `world_size` contributes. Global rank 0 also writes `state.json` and publishes."""

    rank: int
    world_size: int
    data_rank: int
    writes: frozenset[Part]

    @classmethod
    def of_data_rank(cls, rank: int, world_size: int, data_rank: int, *, is_first_stage: bool = True) -> "SaveRole":
        """Data rank 0 of a stage writes its layers; each data rank of the first stage its random state."""
        writes: set[Part] = set()
        if data_rank == 0:
            writes |= {"weights", "optimizer_state"}
        if is_first_stage:
            writes.add("random_state")
        return cls(rank, world_size, data_rank, frozenset(writes))

    @property
    def publishes(self) -> bool:
        """Whether this rank prepares the directory and publishes the result."""
        return self.rank == 0


def save(
    root: Path, snapshot: Snapshot, *, role: SaveRole, agree: Callable[[bool], bool], retention: Retention | None = None
) -> Path:
    """Save `snapshot` as `<root>/global_step<iteration>`, point `latest` to it, prune; return the directory.

    Collective over all ranks: every rank must call it, with the same `root` (one file system for all) and iteration.
    `agree(ok)` waits for all ranks and is True where all passed True (an all-reduce; for one process: `bool`). So a
    full disk on one rank makes all of them raise CheckpointError, nothing is published, and the checkpoint before stays
    the latest. The tensors of one file at a time are copied to memory.
    """
    directory = root / catalog.step_name(snapshot.run_state.iteration)
    steps: list[Callable[[], None]] = [
        lambda: _prepare(root, snapshot.run_state.iteration) if role.publishes else None,
        lambda: _write_parts(root, snapshot, role),
        lambda: _finish(root, snapshot, role, retention or Retention()) if role.publishes else None,
    ]
    for step in steps:
        failure = _attempt(step)
        if agree(failure is None):
            continue
        if failure is None:
            raise CheckpointError(f"{directory} was not saved: another rank failed")
        raise CheckpointError(f"rank {role.rank} could not save {directory}: {_reason(failure)}") from failure
    return directory


def _attempt(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as failure:
        return failure
    return None


def _reason(failure: Exception) -> str:
    if isinstance(failure, OSError) and failure.strerror:
        return f"{failure.strerror} ({failure.filename})" if failure.filename else failure.strerror
    return str(failure)


def _prepare(root: Path, iteration: int) -> None:
    durable.make_directory(root)
    catalog.clear_remains(root)
    durable.make_directory(catalog.temporary_directory(root, iteration))


def _write_parts(root: Path, snapshot: Snapshot, role: SaveRole) -> None:
    """Write this rank's files and, last, the list of them: a rank without a list did not finish."""
    directory = catalog.temporary_directory(root, snapshot.run_state.iteration)
    entries = []
    for name, content in _files(snapshot, role):
        durable.write_file(directory / name, content)
        entries.append(FileEntry.of(name, content))
    listing = json.dumps([asdict(entry) for entry in entries])
    durable.write_file(_listing_path(directory, role.rank), listing.encode())


def _files(snapshot: Snapshot, role: SaveRole) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files `role` writes, made one at a time."""
    if "weights" in role.writes:
        for layer, names in _names_by_layer(snapshot.weights).items():
            yield weights_file(layer), _serialize({name: snapshot.weights[name] for name in names})
    if "optimizer_state" in role.writes and snapshot.optimizer_state is not None:
        state = snapshot.optimizer_state
        for layer, names in _names_by_layer(state).items():
            tensors = {f"{name}/{key}": tensor for name in names for key, tensor in state[name].items()}
            yield optimizer_file(layer), _serialize(tensors)
    if "random_state" in role.writes and snapshot.random_state is not None:
        yield random_file(role.data_rank), _serialize(snapshot.random_state.to_tensors())
    if role.publishes:
        yield STATE_FILE, (json.dumps(asdict(snapshot.run_state), indent=1) + "\n").encode()


def _names_by_layer(parameters: Mapping[str, object]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name in parameters:
        names.setdefault(layer_index(name), []).append(name)
    return dict(sorted(names.items()))


def _serialize(tensors: Mapping[str, Tensor]) -> bytes:
    # The format of the values is named in the header because transformers asks for it.
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(on_cpu, metadata={"format": "pt"})


def _finish(root: Path, snapshot: Snapshot, role: SaveRole, retention: Retention) -> None:
    iteration = snapshot.run_state.iteration
    directory = catalog.temporary_directory(root, iteration)
    listings = [_listing_path(directory, rank) for rank in range(role.world_size)]
    absent = [str(rank) for rank, listing in enumerate(listings) if not listing.exists()]
    if absent:
        raise CheckpointError(
            f"rank(s) {', '.join(absent)} did not write their part into {directory}: they failed, or it is not on a "
            "file system shared by all ranks"
        )
    manifest = Manifest(
        iteration=iteration,
        files=_merge(listings),
        model=dict(snapshot.model),
        parallel_sizes=snapshot.parallel_sizes,
        bucket_plan=None if snapshot.bucket_plan is None else tuple(tuple(names) for names in snapshot.bucket_plan),
    )
    durable.write_file(directory / MANIFEST_FILE, manifest.to_bytes())
    for listing in listings:
        listing.unlink()
    durable.sync_directory(directory)
    catalog.publish(root, iteration)
    _prune(root, retention)


def _merge(listings: list[Path]) -> tuple[FileEntry, ...]:
    entries = [FileEntry(**entry) for listing in listings for entry in json.loads(listing.read_bytes())]
    names = [entry.name for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CheckpointError(f"more than one rank wrote {', '.join(twice)}: their roles overlap")
    return tuple(sorted(entries, key=lambda entry: entry.name))


def _prune(root: Path, retention: Retention) -> None:
    try:
        deleted = catalog.prune(root, retention)
    except OSError as error:
        # The new checkpoint is safe: a full or read-only old directory is no reason to end the run.
        logger.warning("old checkpoints under %s were not all deleted: %s", root, _reason(error))
        return
    if deleted:
        logger.info("deleted %s under %s", ", ".join(map(catalog.step_name, deleted)), root)


def _listing_path(directory: Path, rank: int) -> Path:
    return directory / f".files_of_rank_{rank:05d}.json"
