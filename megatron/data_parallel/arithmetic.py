"""How a sum over ranks becomes an average, and in which dtype it travels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.data_parallel.partition import ReductionGroup


@dataclass(frozen=True)
class ReductionArithmetic:
    """How a sum over ranks becomes an average, and in which dtype it travels.

    Gradients are accumulated in `accumulation_dtype`, and the collective sends `wire_dtype`. With `prescale` the
    division rides on the accumulation, which costs nothing; without it gradients are divided by `predivide_factor`
    before and by the rest after the collective. With `average_in_collective` the backend divides, where it sums.
    """

    accumulation_dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype = torch.float32
    prescale: bool = True
    predivide_factor: float = 1.0
    average_in_collective: bool = False

    def factors(self, group: ReductionGroup, *, backend_averages: bool) -> tuple[float, float]:
        """Factors to multiply a gradient by before and after the collective, which make the average."""
        if self.average_in_collective and group.size > 1:
            return 1.0, (group.size if backend_averages else 1) / group.divisor
        if self.prescale:
            return 1.0 / group.divisor, 1.0
        return 1.0 / self.predivide_factor, self.predivide_factor / group.divisor

    def operation(self, group: ReductionGroup) -> dist.ReduceOp.RedOpType:
        """What the backend does with the contributions. A group of one is never asked to average."""
        return dist.ReduceOp.AVG if self.average_in_collective and group.size > 1 else dist.ReduceOp.SUM


def scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply `values` by `factor` in place, unless that would change nothing, and return them."""
    return values if factor == 1.0 else values.mul_(factor)
