"""What a layer needs to know about tensor parallelism: its place, nothing else. Handed down from the rank grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
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
