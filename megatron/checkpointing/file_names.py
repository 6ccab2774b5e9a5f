"""Names of a checkpoint's files: what they hold can be told from them, and no two ranks write the same one.

A part about an axis of the rank grid is there only where that axis has more than one rank and the file differs along
it, so a run with one tensor rank and no ZeRO has `layer_003.safetensors` and `optimizer_layer_003.safetensors`.
"""

import re
from typing import Literal

Content = Literal["weights", "optimizer"]
CONTENTS: tuple[Content, ...] = ("weights", "optimizer")

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"

_LAYER_OF_PARAMETER = re.compile(r"layers\.(\d+)\.")
_PREFIXES: dict[Content, str] = {"weights": "layer_", "optimizer": "optimizer_layer_"}


def layer_index(parameter: str) -> int:
    """Index of the layer a parameter belongs to; ValueError unless its name is `layers.<index>.<...>`."""
    match = _LAYER_OF_PARAMETER.match(parameter)
    if match is None:
        raise ValueError(f"parameter name {parameter!r} does not begin with 'layers.<index>.'")
    return int(match.group(1))


def content_of(file: str) -> Content | None:
    """What kind of tensors are in the file; None for the files that are not about layers."""
    for content, prefix in _PREFIXES.items():
        if file.startswith(prefix):
            return content
    return None


def axis_part(axis: str, rank: int, size: int) -> str:
    """The part of a file's name that says which rank of `size` along `axis` it is from; empty for the only one."""
    return f".{axis}_{rank:02d}_of_{size:02d}" if size > 1 else ""


def layer_file(content: Content, layer: int, axis_parts: str = "") -> str:
    """Name of a file with weights or optimizer state of layer `layer`."""
    return f"{_PREFIXES[content]}{layer:03d}{axis_parts}.safetensors"
