"""From the pieces that were saved to the elements that a rank wants, whatever the two layouts; one tensor at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.checkpointing.file_names import Content
from megatron.checkpointing.inventory import FoundPiece, Piece
from megatron.checkpointing.layout import ParameterLayout
from megatron.checkpointing.open_files import OpenFiles
from megatron.checkpointing.reader import CheckpointReader
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class WantedTensor:
    """Elements of a parameter that this rank holds: `piece` of the slices of `layout`.

    `content` and `key` say which tensor: the weight itself, or the optimizer's `key` (a 0-dim one: `is_counter`).
    """

    content: Content
    parameter: str
    key: str | None
    layout: ParameterLayout
    piece: Piece
    is_counter: bool = False

    @property
    def name(self) -> str:
        """What the tensor is called in its files."""
        return self.parameter if self.key is None else f"{self.parameter}/{self.key}"


def needed_pieces(reader: CheckpointReader, wanted: WantedTensor) -> list[FoundPiece]:
    """The saved pieces that hold any of what is wanted: of equal slices its own, else all that there are."""
    found = reader.pieces(wanted.content, wanted.parameter)
    if not _saved_layout(reader, wanted).has_slices_of(wanted.layout):
        return found
    return [entry for entry in found if entry.piece.overlap(wanted.piece)]


def assemble(reader: CheckpointReader, wanted: WantedTensor, files: OpenFiles) -> Tensor:
    """Return the wanted elements as 1-D, the counter as 0-dim, in the dtype they were saved in.

    Where the checkpoint has fewer rows of a vocabulary than the wanted layout, the elements that it lacks, which are
    the last of a slice, are left out.
    """
    found = needed_pieces(reader, wanted)
    if wanted.is_counter:
        return files.tensor(found[0].file, wanted.name)
    saved = _saved_layout(reader, wanted)
    if saved.has_slices_of(wanted.layout):
        return _run(found, wanted.name, wanted.piece, files)
    whole = _whole(saved, found, wanted.name, files)
    present = wanted.layout.slice_numel
    if saved.shape != wanted.layout.shape:
        present = _rows_present(saved, wanted) * wanted.layout.slice_numel // wanted.layout.slice_shape[0]
        whole = _resized(whole, wanted.layout.shape[0])
    start, stop = wanted.piece.start, max(wanted.piece.start, min(wanted.piece.stop, present))
    return wanted.layout.take(whole, wanted.piece.slice_index).flatten()[start:stop]


def check_agreement(reader: CheckpointReader, wanted: Iterable[WantedTensor], files: OpenFiles) -> None:
    """Compare what several files hold of the wanted tensors; CheckpointError where their bits differ.

    Ranks that held the same elements may each have saved them, and a counter is in every file with state of its
    parameter. What is in one file only is not read.
    """
    for tensor in wanted:
        found = needed_pieces(reader, tensor)
        for one, other, shared in _pairs_of_counters(found) if tensor.is_counter else _shared_pieces(found):
            if tensor.is_counter:
                values = [files.tensor(entry.file, tensor.name) for entry in (one, other)]
            else:
                values = [_run([entry], tensor.name, shared, files) for entry in (one, other)]
            if not _same_bits(*values):
                raise CheckpointError(
                    f"{reader.directory} contradicts itself: elements {shared.start} to {shared.stop} of {tensor.name} "
                    f"differ between {one.file} and {other.file}"
                )


def _saved_layout(reader: CheckpointReader, wanted: WantedTensor) -> ParameterLayout:
    return reader.manifest.parameters[wanted.parameter].layout


def _whole(layout: ParameterLayout, found: list[FoundPiece], name: str, files: OpenFiles) -> Tensor:
    """The tensor of the whole model."""
    whole = None
    for index in range(layout.num_slices):
        elements = _run(found, name, Piece(index, 0, layout.slice_numel), files)
        if whole is None:
            whole = elements.new_empty(layout.shape)
        layout.put(whole, index, elements)
    assert whole is not None
    return whole


def _run(found: list[FoundPiece], name: str, wanted: Piece, files: OpenFiles) -> Tensor:
    """The elements `wanted`, all of which are in `found`, as a 1-D tensor."""
    parts = []
    position = wanted.start
    for entry in sorted(found, key=lambda entry: entry.piece.start):
        shared = entry.piece.overlap(wanted)
        if shared is not None and shared.stop > position:
            elements = files.tensor(entry.file, name).flatten()
            parts.append(elements[position - entry.piece.start : shared.stop - entry.piece.start])
            position = shared.stop
    return parts[0] if len(parts) == 1 else torch.cat(parts or [torch.empty(0)])


def _shared_pieces(found: list[FoundPiece]) -> Iterator[tuple[FoundPiece, FoundPiece, Piece]]:
    """Neighbours in the order of their first elements that have elements in common."""
    ordered = sorted(found, key=lambda entry: (entry.piece.slice_index, entry.piece.start))
    reaching: FoundPiece | None = None
    for entry in ordered:
        shared = None if reaching is None else reaching.piece.overlap(entry.piece)
        if reaching is not None and shared is not None:
            yield reaching, entry, shared
        if shared is None or reaching is None or entry.piece.stop > reaching.piece.stop:
            reaching = entry


def _pairs_of_counters(found: list[FoundPiece]) -> Iterator[tuple[FoundPiece, FoundPiece, Piece]]:
    """Each file with the first: all of them have the counter."""
    for entry in found[1:]:
        yield found[0], entry, entry.piece


def _same_bits(one: Tensor, other: Tensor) -> bool:
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


def _rows_present(saved: ParameterLayout, wanted: WantedTensor) -> int:
    """How many rows of the wanted slice the checkpoint has."""
    rows = wanted.layout.slice_shape[0]
    return max(0, min(rows, saved.shape[0] - wanted.piece.slice_index * rows))


def _resized(whole: Tensor, num_rows: int) -> Tensor:
    resized = whole.new_zeros(num_rows, *whole.shape[1:])
    common = min(num_rows, whole.shape[0])
    resized[:common] = whole[:common]
    return resized
