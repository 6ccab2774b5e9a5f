"""Which ranks reduce a parameter's gradient together, and the place in the launch order of those that wait longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.data_parallel.partition import ReductionGroup
from megatron.model.decoder import Decoder
from megatron.mpu.grid import ParallelGrid


@dataclass(frozen=True)
class ReductionGroups:
    """The reduction group of each parameter of this rank.

    `tied_weight` names the parameter of which first and last stage have a copy each, where this is one of them. Its
    gradient is averaged over the data ranks and summed over the two stages in one collective: the union of both stages'
    data ranks, divided by the number of data ranks. So both copies get the same bits.
    """

    grid: ParallelGrid
    tied_weight: str | None

    def group_of(self, name: str) -> ReductionGroup:
        """Return the group of the parameter `name`."""
        data, tied = self.grid.data, self.grid.tied
        if name == self.tied_weight and tied is not None:
            return ReductionGroup("tied", tied.size, data.size, tied.rank, tied.handle, spans_stages=True)
        return ReductionGroup("data", data.size, data.size, data.rank, data.handle)

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
