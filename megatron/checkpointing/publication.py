"""From the parts that all ranks wrote to a checkpoint that counts: lists, completeness, manifest, name."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from megatron.checkpointing import catalog, durable
from megatron.checkpointing.file_names import MANIFEST_FILE
from megatron.checkpointing.inventory import SavedParameter
from megatron.checkpointing.manifest import FileEntry, Manifest
from megatron.checkpointing.snapshot import Snapshot
from megatron.errors import CheckpointError


def write_listing(directory: Path, rank: int, files: list[FileEntry], parameters: Mapping[str, SavedParameter]) -> None:
    """Write what `rank` has written: a rank without a list did not finish."""
    listing = {
        "files": [entry.to_json() for entry in files],
        "parameters": {name: asdict(parameter) for name, parameter in parameters.items()},
    }
    durable.write_file(_listing_path(directory, rank), json.dumps(listing).encode())


def publish(root: Path, snapshot: Snapshot, world_size: int) -> None:
    """Write the manifest and give the checkpoint its name. CheckpointError if any part of it is missing."""
    iteration = snapshot.run_state.iteration
    directory = catalog.temporary_directory(root, iteration)
    paths = [_listing_path(directory, rank) for rank in range(world_size)]
    absent = [str(rank) for rank, path in enumerate(paths) if not path.exists()]
    if absent:
        raise CheckpointError(
            f"rank(s) {', '.join(absent)} did not write their part into {directory}: they failed, or it is not on a "
            "file system shared by all ranks"
        )
    listings = [json.loads(path.read_bytes()) for path in paths]
    manifest = Manifest(
        iteration=iteration,
        files=_merge_files(listings),
        model=dict(snapshot.model),
        parallel_sizes=snapshot.holding.position.sizes,
        parameters=_merge_parameters(listings),
        bucket_plan=None if snapshot.bucket_plan is None else tuple(tuple(names) for names in snapshot.bucket_plan),
    )
    gaps = manifest.gaps()
    if gaps:
        raise CheckpointError(f"no rank wrote {gaps}: the ranks do not hold the whole model between them")
    durable.write_file(directory / MANIFEST_FILE, manifest.to_bytes())
    for path in paths:
        path.unlink()
    durable.sync_directory(directory)
    catalog.publish(root, iteration)


def _merge_files(listings: list[dict[str, list[dict[str, object]]]]) -> tuple[FileEntry, ...]:
    entries = [FileEntry.from_json(entry) for listing in listings for entry in listing["files"]]
    times = Counter(entry.name for entry in entries)
    twice = sorted(name for name in times if times[name] > 1)
    if twice:
        raise CheckpointError(f"more than one rank wrote {', '.join(twice)}: their roles overlap")
    return tuple(sorted(entries, key=lambda entry: entry.name))


def _merge_parameters(listings: list[dict[str, dict[str, dict[str, object]]]]) -> dict[str, SavedParameter]:
    merged: dict[str, SavedParameter] = {}
    for listing in listings:
        for name, content in listing["parameters"].items():
            parameter = SavedParameter.from_json(content)
            try:
                merged[name] = merged.setdefault(name, parameter).merged(parameter)
            except ValueError as error:
                raise CheckpointError(f"ranks disagree about {name}: {error}") from error
    return dict(sorted(merged.items()))


def _listing_path(directory: Path, rank: int) -> Path:
    return directory / f".files_of_rank_{rank:05d}.json"
