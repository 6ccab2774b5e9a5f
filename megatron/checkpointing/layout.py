"""How the tensor ranks' slices of a parameter lie in the whole of it: axes and arithmetic of indices, no files."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.mpu.tensor_parallel import Placement


@dataclass(frozen=True)
class ParameterLayout:
    """A parameter of the whole model, of `shape`, and its cut into `num_slices` equal slices along `split_dim`.

    `num_fused` equal blocks lie one behind the other along that dim; slice i holds part i of each of them, in their
    order. One slice is the whole parameter, whatever `split_dim` says of how it would be cut.
    """

    shape: tuple[int, ...]
    split_dim: int | None = None
    num_fused: int = 1
    num_slices: int = 1

    @classmethod
    def of_slice(cls, slice_shape: Sequence[int], placement: Placement, num_tensor_ranks: int) -> "ParameterLayout":
        """The layout of a parameter of which each of `num_tensor_ranks` holds a slice of `slice_shape`."""
        shape = list(slice_shape)
        if placement.split_dim is None:
            return cls(tuple(shape))
        shape[placement.split_dim] *= num_tensor_ranks
        return cls(tuple(shape), placement.split_dim, placement.num_fused, num_tensor_ranks)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of one slice."""
        shape = list(self.shape)
        if self.split_dim is not None:
            shape[self.split_dim] //= self.num_slices
        return tuple(shape)

    @property
    def slice_numel(self) -> int:
        """Number of elements of one slice."""
        numel = 1
        for size in self.slice_shape:
            numel *= size
        return numel

    def has_slices_of(self, other: "ParameterLayout") -> bool:
        """Whether each slice holds the same elements, in the same order, as the one with its number in `other`."""
        if self.shape != other.shape or self.num_slices != other.num_slices:
            return False
        return self.num_slices == 1 or (self.split_dim, self.num_fused) == (other.split_dim, other.num_fused)

    def take(self, whole: Tensor, index: int) -> Tensor:
        """Slice `index` of `whole`, a contiguous tensor of `shape`; a view where its elements lie together."""
        if self.split_dim is None or self.num_slices == 1:
            return whole
        return self._blocks(whole, index).flatten(self.split_dim, self.split_dim + 1)

    def put(self, whole: Tensor, index: int, values: Tensor) -> None:
        """Write the elements `values` of slice `index`, in any shape, to their places in `whole`."""
        if self.split_dim is None or self.num_slices == 1:
            whole.copy_(values.view(self.shape))
        else:
            blocks = self._blocks(whole, index)
            blocks.copy_(values.view(blocks.shape))

    def _blocks(self, whole: Tensor, index: int) -> Tensor:
        """Part `index` of each fused block, as a view with the number of the block as an extra dim."""
        assert self.split_dim is not None
        size = self.shape[self.split_dim] // self.num_fused // self.num_slices
        return whole.unflatten(self.split_dim, (self.num_fused, -1)).narrow(self.split_dim + 1, index * size, size)
