"""Which ranks reduce a parameter's gradient together, and which of them answers for it in the norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.data_parallel.partition import ReductionGroup
from megatron.model.decoder import Decoder
from megatron.mpu.grid import AxisGroup, ParallelGrid
from megatron.mpu.tensor_parallel import Placement
from megatron.optimizer.global_norm import GlobalNorm


@dataclass(frozen=True)
class ReductionGroups:
    """The reduction group of each parameter of this rank: its data ranks, and those that hold terms of its gradient.

    `tied_weight` names the parameter of which first and last stage have a copy each, where this is one of them. Its
    gradient is averaged over the data ranks and summed over the two stages in one collective: the union of both stages'
    data ranks, divided by the number of data ranks. So both copies get the same bits. A gradient of which each tensor
    rank has a term, as `placements` say, is summed over the tensor ranks in the same way.
    """

    grid: ParallelGrid
    placements: Mapping[str, Placement]
    tied_weight: str | None

    def group_of(self, name: str) -> ReductionGroup:
        """Return the group of the parameter `name`."""
        if name == self.tied_weight and self.grid.tied is not None:
            return self._group("tied", self.grid.tied)
        if self._has_terms(name):
            return self._group("data x tensor", self.grid.stage)
        return self._group("data", self.grid.data)

    def _group(self, name: str, axis_group: AxisGroup) -> ReductionGroup:
        return ReductionGroup(name, axis_group.size, self.grid.data.size, axis_group.rank, axis_group.handle)

    def _has_terms(self, name: str) -> bool:
        return self.grid.tensor.size > 1 and self.placements[name].partial_gradient

    def global_norm(self, device: torch.device, names: Iterable[str], *, sharded: bool) -> GlobalNorm:
        """Return the norm in which each gradient counts once, whole or `sharded` over the ranks of its group."""
        counted = {name for name in names if self._answers_for(name, sharded=sharded)}
        if sharded:
            return GlobalNorm(device, counted, dist.group.WORLD if self.grid.world_size > 1 else None)
        return GlobalNorm(device, counted, self.grid.model.handle)

    def _answers_for(self, name: str, *, sharded: bool) -> bool:
        """Whether this rank counts what it has of a gradient, of the ranks that have the same."""
        if name == self.tied_weight and not sharded and not self.grid.is_first_stage:
            return False
        shares_it = self.placements[name].split_dim is not None or (sharded and self._has_terms(name))
        return shares_it or self.grid.tensor.rank == 0

    def tied_last(self, order: Sequence[str]) -> list[str]:
        """Return `order` with the tied weight at its end.

        On the last stage its gradient is ready first, but the first stage has its own long after: planned where it is
        ready, its bucket would keep back all others of the last stage.
        """
        return sorted(order, key=lambda name: name == self.tied_weight)


def tied_weight(module: torch.nn.Module) -> str | None:
    """Return the name of the parameter of `module` of which another stage has a copy."""
    for prefix, submodule in module.named_modules():
        if isinstance(submodule, Decoder) and submodule.weight_of_other_stage is not None:
            return f"{prefix}.{submodule.weight_of_other_stage}" if prefix else submodule.weight_of_other_stage
    return None
