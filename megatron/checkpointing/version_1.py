"""Checkpoints of format version 1: whole tensors only, and no word in the manifest about what is in which file.

What version 2 writes into the manifest is read from the headers of the files instead.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from megatron.checkpointing.file_names import content_of
from megatron.checkpointing.inventory import Piece, SavedParameter
from megatron.checkpointing.layout import ParameterLayout
from megatron.checkpointing.manifest import FileEntry, Manifest
from megatron.checkpointing.open_files import OpenFiles

_Shapes = dict[str, tuple[int, ...]]


def with_inventory(manifest: Manifest, directory: Path) -> Manifest:
    """Return the manifest with what the files hold; CheckpointError if a header cannot be read."""
    with OpenFiles(directory) as files:
        shapes = {
            entry.name: {name: files.shape(entry.name, name) for name in files.names(entry.name)}
            for entry in manifest.files
            if content_of(entry.name) is not None
        }
    parameters = _parameters(shapes)
    entries = tuple(_with_pieces(entry, shapes.get(entry.name, {}), parameters) for entry in manifest.files)
    return replace(manifest, parameters=parameters, files=entries)


def _parameters(shapes: dict[str, _Shapes]) -> dict[str, SavedParameter]:
    state: dict[str, _Shapes] = defaultdict(dict)
    for file, tensors in shapes.items():
        if content_of(file) == "optimizer":
            for tensor, shape in tensors.items():
                parameter, key = tensor.rsplit("/", 1)
                state[parameter][key] = shape
    return {
        parameter: SavedParameter(
            ParameterLayout(shape),
            state=tuple(sorted(key for key, of_state in state[parameter].items() if of_state)),
            counters=tuple(sorted(key for key, of_state in state[parameter].items() if not of_state)),
        )
        for file, tensors in shapes.items()
        if content_of(file) == "weights"
        for parameter, shape in tensors.items()
    }


def _with_pieces(entry: FileEntry, tensors: _Shapes, parameters: dict[str, SavedParameter]) -> FileEntry:
    # A tensor of state is called `<parameter>/<state>`.
    names = {tensor.split("/")[0] for tensor in tensors}
    return replace(entry, pieces={name: Piece(0, 0, parameters[name].layout.slice_numel) for name in names})
