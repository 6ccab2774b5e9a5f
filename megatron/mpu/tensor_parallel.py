"""What a layer needs to know about tensor parallelism, and what others need to know about a layer's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TensorParallel:
    """A tensor rank's place among the `size` ranks that split each layer; `group` is None at size 1."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    def shard(self, tensor: torch.Tensor, *, dim: int) -> torch.Tensor:
        """Return this rank's equal part of a full tensor along `dim`, as a view."""
        return tensor.chunk(self.size, dim)[self.rank]


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
