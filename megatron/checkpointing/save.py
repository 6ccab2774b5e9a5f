"""Writing a checkpoint: every rank its parts, then one rank publishes the whole or nothing."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.checkpointing import catalog, durable
from megatron.checkpointing.catalog import Retention
from megatron.checkpointing.inventory import Piece
from megatron.checkpointing.manifest import FileEntry
from megatron.checkpointing.parts import run_state_file, saved_parameters, tensor_files
from megatron.checkpointing.publication import publish, write_listing
from megatron.checkpointing.role import SaveRole
from megatron.checkpointing.snapshot import Snapshot
from megatron.errors import CheckpointError

logger = logging.getLogger(__name__)


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
    """Write this rank's files and, last, the list of them."""
    directory = catalog.temporary_directory(root, snapshot.run_state.iteration)
    parameters = saved_parameters(snapshot)
    entries = []
    for file in tensor_files(snapshot, role):
        entries.append(_write(directory, file.name, file.to_bytes(), file.pieces))
    if role.publishes:
        entries.append(_write(directory, *run_state_file(snapshot), {}))
    written = {name: parameters[name] for entry in entries for name in entry.pieces}
    write_listing(directory, role.rank, entries, written)


def _write(directory: Path, name: str, content: bytes, pieces: Mapping[str, Piece]) -> FileEntry:
    durable.write_file(directory / name, content)
    return FileEntry.of(name, content, pieces)


def _finish(root: Path, snapshot: Snapshot, role: SaveRole, retention: Retention) -> None:
    publish(root, snapshot, role.world_size)
    _prune(root, retention)


def _prune(root: Path, retention: Retention) -> None:
    try:
        deleted = catalog.prune(root, retention)
    except OSError as error:
        # The new checkpoint is safe: a full or read-only old directory is no reason to end the run.
        logger.warning("old checkpoints under %s were not all deleted: %s", root, _reason(error))
        return
    if deleted:
        logger.info("deleted %s under %s", ", ".join(map(catalog.step_name, deleted)), root)
