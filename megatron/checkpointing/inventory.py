"""What is in the files of a checkpoint: which elements of which parameter, and whether all of them are there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.layout import ParameterLayout

_SHOWN = 10


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of slice `slice_index` of a parameter, the slice taken as contiguous."""

    slice_index: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def overlap(self, other: "Piece") -> "Piece | None":
        """The elements that are in both; None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        if self.slice_index != other.slice_index or start >= stop:
            return None
        return Piece(self.slice_index, start, stop)

    def to_json(self) -> list[int]:
        """`[slice_index, start, stop]`."""
        return [self.slice_index, self.start, self.stop]


@dataclass(frozen=True)
class FoundPiece:
    """A piece and the name of the file that holds it."""

    file: str
    piece: Piece


@dataclass(frozen=True)
class SavedParameter:
    """A parameter in a checkpoint. `state` names its optimizer tensors with an element for each of its own.

    `counters` names the optimizer's 0-dim tensors, which every file with state of the parameter repeats.
    """

    layout: ParameterLayout
    state: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "SavedParameter":
        """Inverse of `dataclasses.asdict` by way of JSON."""
        layout = dict(content["layout"])
        layout["shape"] = tuple(layout["shape"])
        return cls(ParameterLayout(**layout), tuple(content["state"]), tuple(content["counters"]))

    def merged(self, other: "SavedParameter") -> "SavedParameter":
        """What two ranks say together; ValueError where they contradict each other.

        Only the rank that writes weights may know of no state.
        """
        if self.layout != other.layout:
            raise ValueError(f"its layout is {self.layout} on one rank and {other.layout} on another")
        names = {(entry.state, entry.counters) for entry in (self, other) if entry.state or entry.counters}
        if len(names) > 1:
            raise ValueError(f"its optimizer state has different names on different ranks: {sorted(names)}")
        return self if self.state or self.counters else other


def first_gap(pieces: Iterable[Piece], wanted: Piece) -> Piece | None:
    """The first elements of `wanted` that none of `pieces` holds."""
    position = wanted.start
    for piece in sorted(pieces, key=lambda piece: piece.start):
        shared = piece.overlap(wanted)
        if shared is None:
            continue
        if shared.start > position:
            return Piece(wanted.slice_index, position, shared.start)
        position = max(position, shared.stop)
    return Piece(wanted.slice_index, position, wanted.stop) if position < wanted.stop else None


def describe_gaps(found: Mapping[str, list[FoundPiece]], parameters: Mapping[str, SavedParameter]) -> str:
    """A list of elements that are missing from parameters of which there are others; empty if all is there."""
    gaps = []
    for name, pieces in found.items():
        layout = parameters[name].layout
        for index in range(layout.num_slices):
            gap = first_gap((entry.piece for entry in pieces), Piece(index, 0, layout.slice_numel))
            if gap is not None:
                of_slice = f" of slice {index}" if layout.num_slices > 1 else ""
                gaps.append(f"{name} (elements {gap.start} to {gap.stop}{of_slice})")
    return list_some(gaps)


def list_some(names: list[str]) -> str:
    """The first names of a list and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
