"""What a layer needs to know about tensor parallelism, and what others need to know about a layer's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megatron.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TensorParallel:
    """A tensor rank's place among the `size` ranks that split each layer; `group` is None at size 1.

    With `sequence_parallel` the activations between the split layers are split too, along the sequence.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    sequence_parallel: bool = False

    @property
    def splits_sequence(self) -> bool:
        """Whether a rank holds a part of the sequence between the split layers: `sequence_parallel`, and not alone."""
        return self.sequence_parallel and self.size > 1

    def shard(self, tensor: torch.Tensor, *, dim: int) -> torch.Tensor:
        """Return this rank's equal part of a full tensor along `dim`, as a view."""
        return tensor.chunk(self.size, dim)[self.rank]

    def share_of(self, name: str, total: int) -> int:
        """Return each rank's equal part of `total`. Raises ConfigError, with `name` and the numbers, without one."""
        if total % self.size:
            raise ConfigError(f"{name} {total} is not a multiple of model_parallel_size {self.size}")
        return total // self.size

    def check_length(self, length: int) -> None:
        """Raise ValueError when a tensor's dim of `length` cannot be divided over the ranks."""
        if length % self.size:
            raise ValueError(f"a length of {length} cannot be divided over {self.size} tensor ranks")


NOT_SPLIT = TensorParallel()
"""The place of the only tensor rank."""


@dataclass(frozen=True)
class Placement:
    """How the tensor ranks hold one parameter.

    `split_dim` None means that every rank holds the whole parameter; otherwise each holds an equal part along that dim,
    where `num_fused` equal blocks lie one behind the other and each is split by itself. With `partial_gradient` a
    rank's gradient is one term of a sum over the tensor ranks: a norm under sequence parallelism sees a part of the
    sequence only, a norm of attention heads a part of the heads.
    """

    split_dim: int | None = None
    num_fused: int = 1
    partial_gradient: bool = False


@runtime_checkable
class PlacesParameters(Protocol):
    """A module with parameters that are not simply whole on every tensor rank."""

    def placements(self) -> Mapping[str, Placement]:
        """Return the placement of such parameters by their names within the module."""


def parameter_placements(module: nn.Module) -> dict[str, Placement]:
    """Return the placement of every parameter of `module` by name; the default is whole on every tensor rank."""
    found = dict.fromkeys((name for name, _ in module.named_parameters()), Placement())
    for prefix, submodule in module.named_modules():
        if isinstance(submodule, PlacesParameters):
            for name, placement in submodule.placements().items():
                full_name = f"{prefix}.{name}" if prefix else name
                if full_name in found:
                    found[full_name] = placement
    return found


def partial_gradients(module: nn.Module, *children: str) -> dict[str, Placement]:
    """Return for `placements` that all parameters of some children (also such as are None) have partial gradients."""
    return {
        f"{child}.{name}": Placement(partial_gradient=True)
        for child in children
        if (submodule := getattr(module, child)) is not None
        for name, _ in submodule.named_parameters()
    }
