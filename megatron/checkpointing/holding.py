"""Which part of the whole model a rank holds, in words that saving and loading share."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from megatron.checkpointing.file_names import axis_part, layer_index
from megatron.checkpointing.inventory import Piece
from megatron.checkpointing.layout import ParameterLayout
from megatron.mpu.tensor_parallel import Placement

_WHOLE = Placement()


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the rank grid."""

    pp: int = 1
    tp: int = 1
    dp: int = 1


@dataclass(frozen=True)
class GridPosition:
    """A rank's place on the grid of stages, data ranks and tensor ranks."""

    stage: int = 0
    data_rank: int = 0
    tensor_rank: int = 0
    sizes: ParallelSizes = field(default_factory=ParallelSizes)

    @property
    def exists(self) -> bool:
        """Whether a grid of these sizes has such a rank."""
        sizes = self.sizes
        return self.stage < sizes.pp and self.data_rank < sizes.dp and self.tensor_rank < sizes.tp

    @property
    def tensor_part(self) -> str:
        """Part of a file's name that tells tensor ranks apart."""
        return axis_part("tensor", self.tensor_rank, self.sizes.tp)

    @property
    def data_part(self) -> str:
        """Part of a file's name that tells data ranks apart."""
        return axis_part("data", self.data_rank, self.sizes.dp)

    @property
    def stage_part(self) -> str:
        """Part of a file's name that tells stages apart."""
        return axis_part("stage", self.stage, self.sizes.pp)


def random_file(position: GridPosition) -> str:
    """Name of the file with the random state of a rank."""
    return f"random_rank_{position.data_rank:03d}{position.stage_part}{position.tensor_part}.safetensors"


@dataclass(frozen=True)
class Holding:
    """What a rank holds of each parameter; by default, everything.

    `placements` says how tensor ranks share a parameter (absent: each has all of it). `shards` names, for each
    parameter whose optimizer state this rank has a part of, the elements [start, stop) of its contiguous slice; None
    without ZeRO, where a rank has the state of its whole slice. `layers` are the stage's own (None: all): a parameter
    of another layer is borrowed, as a tied head on the last stage borrows the embedding's weight from the first.
    """

    position: GridPosition = field(default_factory=GridPosition)
    placements: Mapping[str, Placement] = field(default_factory=dict)
    shards: Mapping[str, range] | None = None
    layers: Collection[int] | None = None

    def layout(self, name: str, weight: Tensor) -> ParameterLayout:
        """Layout of the parameter of which this rank's slice is `weight`."""
        return ParameterLayout.of_slice(weight.shape, self._placement(name), self.position.sizes.tp)

    def slice_index(self, name: str) -> int:
        """Which slice of the parameter this rank holds."""
        return 0 if self._placement(name).split_dim is None else self.position.tensor_rank

    def weight_piece(self, name: str, weight: Tensor) -> Piece:
        """The elements this rank holds of a weight: those of its slice."""
        return Piece(self.slice_index(name), 0, weight.numel())

    def state_piece(self, name: str, weight: Tensor) -> Piece:
        """The elements whose optimizer state this rank holds; none of them where `shards` does not name the weight."""
        if self.shards is None:
            return self.weight_piece(name, weight)
        if not weight.is_contiguous():
            raise ValueError(f"elements of {name} cannot be counted: its strides are {list(weight.stride())}")
        run = self.shards.get(name, range(0))
        return Piece(self.slice_index(name), run.start, max(run.start, run.stop))

    def owns(self, name: str) -> bool:
        """Whether the parameter belongs to one of this stage's layers."""
        return self.layers is None or layer_index(name) in self.layers

    def is_first_with(self, name: str) -> bool:
        """Whether no tensor rank before this one holds the same elements of the weight."""
        return self.position.tensor_rank == 0 or self._placement(name).split_dim is not None

    def is_first_with_state(self, name: str) -> bool:
        """Whether no tensor rank before this one holds the same elements of the optimizer state.

        A gradient that is partial is reduced over tensor and data ranks together, so ZeRO deals the runs of such a
        parameter out to all of them. Any other parameter that tensor ranks share has the same runs on each.
        """
        return self.is_first_with(name) or (self.shards is not None and self._placement(name).partial_gradient)

    def _placement(self, name: str) -> Placement:
        return self.placements.get(name, _WHOLE)
