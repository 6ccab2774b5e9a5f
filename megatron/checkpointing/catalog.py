"""The checkpoints under one `save` directory: their names, which is the latest, which may be deleted.

<save>/global_step<N>/           a complete checkpoint
<save>/latest                    the name of the one to resume from
<save>/.global_step<N>.tmp       being written, or what an interrupted save left
<save>/.global_step<N>.old       the complete predecessor of a `global_step<N>` that is being saved again
<save>/.global_step<N>.deleted   on its way out
"""

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from megatron.checkpointing import durable
from megatron.checkpointing.manifest import MANIFEST_FILE
from megatron.errors import CheckpointError

logger = logging.getLogger(__name__)

LATEST_FILE = "latest"
_STEP_NAME = re.compile(r"global_step(\d+)")
_REMAINS_NAME = re.compile(r"\.(global_step\d+)\.(tmp|old|deleted)")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the `keep_last` with the highest iterations (None: all) and those in `always_keep`.

    `extra_save_iters` belong into `always_keep`: who names an iteration wants it. The one `latest` names stays too.
    """

    keep_last: int | None = None
    always_keep: Collection[int] = field(default_factory=frozenset)


def step_name(iteration: int) -> str:
    """Directory name of the checkpoint of `iteration`: known to all ranks without talking."""
    return f"global_step{iteration}"


def temporary_directory(root: Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is assembled."""
    return root / f".{step_name(iteration)}.tmp"


def step_directory(root: Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is, also if saving it again was interrupted between two renames."""
    directory = root / step_name(iteration)
    replaced = _replaced(directory)
    return replaced if replaced.exists() and not directory.exists() else directory


def saved_iterations(root: Path) -> list[int]:
    """Iterations with a directory that has a manifest, lowest first. Directories of other trainers do not count."""
    found = []
    for manifest in root.glob(f"global_step*/{MANIFEST_FILE}"):
        match = _STEP_NAME.fullmatch(manifest.parent.name)
        if match:
            found.append(int(match.group(1)))
    return sorted(found)


def latest_iteration(root: Path) -> int | None:
    """The iteration `latest` names; None where there is no such file. CheckpointError if it holds anything else."""
    path = root / LATEST_FILE
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    match = _STEP_NAME.fullmatch(text)
    if match is None:
        raise CheckpointError(f"{path} holds {text[:80]!r}, which is not the name of a checkpoint (global_step<N>)")
    return int(match.group(1))


def find_latest(root: Path) -> Path | None:
    """Directory of the checkpoint to resume from, or None if `root` holds none. It need not be complete.

    Without a `latest` file the newest directory with a manifest is taken: a first save may have been interrupted after
    its checkpoint was complete and before `latest` was written.
    """
    iteration = latest_iteration(root)
    if iteration is not None:
        return step_directory(root, iteration)
    saved = saved_iterations(root)
    if not saved:
        return None
    logger.warning("%s has no file %r: taking its newest checkpoint, %s", root, LATEST_FILE, step_name(saved[-1]))
    return root / step_name(saved[-1])


def publish(root: Path, iteration: int) -> None:
    """Give the finished temporary directory its name, then point `latest` to it. For one rank only."""
    directory = root / step_name(iteration)
    replaced = _replaced(directory)
    if directory.exists():
        durable.rename(directory, replaced)
    durable.rename(temporary_directory(root, iteration), directory)
    announcement = root / f".{LATEST_FILE}.tmp"
    durable.write_file(announcement, f"{directory.name}\n".encode())
    durable.rename(announcement, root / LATEST_FILE)
    if replaced.exists():
        durable.remove_tree(replaced)


def clear_remains(root: Path) -> None:
    """Remove what interrupted saves and deletions left, except a predecessor whose successor never came."""
    for path in root.glob(".global_step*"):
        match = _REMAINS_NAME.fullmatch(path.name)
        if match is None:
            continue
        if match.group(2) == "old" and not (root / match.group(1)).exists():
            durable.rename(path, root / match.group(1))
        else:
            durable.remove_tree(path)


def prune(root: Path, retention: Retention) -> list[int]:
    """Delete what `retention` does not keep and return the deleted iterations, lowest first. For one rank only."""
    if retention.keep_last is None:
        return []
    saved = saved_iterations(root)
    keep = {*saved[max(0, len(saved) - retention.keep_last) :], *retention.always_keep, latest_iteration(root)}
    doomed = [iteration for iteration in saved if iteration not in keep]
    for iteration in doomed:
        # A half-deleted directory must not carry a checkpoint's name.
        deleted = root / f".{step_name(iteration)}.deleted"
        durable.rename(root / step_name(iteration), deleted)
        durable.remove_tree(deleted)
    return doomed


def _replaced(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.old")
