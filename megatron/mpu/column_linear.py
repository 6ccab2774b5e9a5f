"""The way into a linear whose output features are split, and the linear itself, as one step of autograd.

One step, because its backward hides one piece of work behind another: the collective over the input's gradient runs
while the weight's gradient is computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron.mpu.collectives import Pending, start_all_reduce, start_gather, start_reduce_scatter
from megatron.mpu.mappings import SEQUENCE_DIM
from megatron.mpu.tensor_parallel import TensorParallel


def column_linear(
    x_BSI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, tensor_parallel: TensorParallel
) -> torch.Tensor:
    """Return x @ weight.T + bias as y_BSO, O being this rank's output features.

    x_BSI is whole on every rank, or with sequence parallelism this rank's part along S, which is gathered first. Its
    gradient is summed over the ranks, in backward: collective over the tensor group.
    """
    if tensor_parallel.size == 1:
        return F.linear(x_BSI, weight_OI, bias_O)
    y_BSO: torch.Tensor = _ColumnLinear.apply(x_BSI, weight_OI, bias_O, tensor_parallel)
    return y_BSO


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        tensor_parallel: TensorParallel,
    ) -> torch.Tensor:
        # Under sequence parallelism only the part is kept: gathering it again in backward is what saves the memory.
        ctx.save_for_backward(x_BSI, weight_OI)
        ctx.tensor_parallel = tensor_parallel
        if tensor_parallel.splits_sequence:
            x_BSI = start_gather(x_BSI, tensor_parallel, dim=SEQUENCE_DIM).wait()
        return F.linear(x_BSI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_BSI, weight_OI = ctx.saved_tensors
        tensor_parallel: TensorParallel = ctx.tensor_parallel
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gathering = None
        if needs_weight and tensor_parallel.splits_sequence:
            gathering = start_gather(x_BSI, tensor_parallel, dim=SEQUENCE_DIM)
        summing = _start_sum(grad_BSO @ weight_OI, tensor_parallel) if needs_x else None
        grad_bias_O = grad_BSO.flatten(0, -2).sum(0) if needs_bias else None
        grad_weight_OI = None
        if needs_weight:
            x_BSI = x_BSI if gathering is None else gathering.wait()
            grad_weight_OI = grad_BSO.flatten(0, -2).T @ x_BSI.flatten(0, -2)
        return None if summing is None else summing.wait(), grad_weight_OI, grad_bias_O, None


def _start_sum(grad_BSI: torch.Tensor, tensor_parallel: TensorParallel) -> Pending:
    """Each rank's output features add their share to the gradient of the one input."""
    if tensor_parallel.splits_sequence:
        return start_reduce_scatter(grad_BSI, tensor_parallel, dim=SEQUENCE_DIM)
    return start_all_reduce(grad_BSI, tensor_parallel)
