"""What happens to activations between layers that are split over the tensor ranks, and to their gradients going back.

Shoeybi et al. 2019, arXiv:1909.08053; along the sequence Korthikanti et al. 2022, arXiv:2205.05198. Activations are
batch first (B S H), so the sequence is dim 1. Each function is collective over the tensor group in forward, backward or
both, and returns its argument where there is nothing to do. The way into a column-parallel linear is part of
`megatron.mpu.column_linear`.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.mpu.collectives import start_all_reduce, start_gather, start_reduce_scatter
from megatron.mpu.tensor_parallel import TensorParallel

SEQUENCE_DIM = 1


def sum_over_ranks(x_BSH: torch.Tensor, tensor_parallel: TensorParallel) -> torch.Tensor:
    """Return the sum of the ranks' x_BSH, whole on every rank.

    Overwrites `x_BSH`, which must be a tensor that nobody else reads.
    """
    if tensor_parallel.size == 1:
        return x_BSH
    summed: torch.Tensor = _AllReduce.apply(x_BSH, tensor_parallel)
    return summed


def sum_into_residual(x_BSH: torch.Tensor, tensor_parallel: TensorParallel) -> torch.Tensor:
    """Return the sum of the ranks' x_BSH as the residual stream has it: with sequence parallelism a part along S.

    May overwrite `x_BSH`, which must be a tensor that nobody else reads. Raises ValueError when S does not divide.
    """
    if not tensor_parallel.splits_sequence:
        return sum_over_ranks(x_BSH, tensor_parallel)
    part: torch.Tensor = _ReduceScatterSequence.apply(x_BSH, tensor_parallel)
    return part


def scatter_sequence(x_BSH: torch.Tensor, tensor_parallel: TensorParallel) -> torch.Tensor:
    """With sequence parallelism, return this rank's part along S of an x_BSH that is whole on every rank.

    The gradient is gathered: what computed x_BSH gets the whole gradient on every rank. Raises ValueError when S does
    not divide.
    """
    if not tensor_parallel.splits_sequence:
        return x_BSH
    part: torch.Tensor = _ScatterSequence.apply(x_BSH, tensor_parallel)
    return part


def gather_logits(logits_BSV: torch.Tensor, tensor_parallel: TensorParallel) -> torch.Tensor:
    """Return logits over the whole vocabulary, on every rank, from each rank's part. For generation, not for training.

    Has no gradient.
    """
    if tensor_parallel.size == 1:
        return logits_BSV
    return start_gather(logits_BSV.detach(), tensor_parallel, dim=-1).wait()


class _AllReduce(torch.autograd.Function):
    """Sum forward. Every rank computes the same from the sum, so its gradient is the one of each rank's term."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor_parallel: TensorParallel) -> torch.Tensor:
        ctx.mark_dirty(x)
        return start_all_reduce(x, tensor_parallel).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: torch.Tensor, tensor_parallel: TensorParallel) -> torch.Tensor:
        ctx.tensor_parallel = tensor_parallel
        return start_reduce_scatter(x_BSH, tensor_parallel, dim=SEQUENCE_DIM).wait()

    @staticmethod
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor, None]:
        return start_gather(grad_BSH, ctx.tensor_parallel, dim=SEQUENCE_DIM).wait(), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: torch.Tensor, tensor_parallel: TensorParallel) -> torch.Tensor:
        ctx.tensor_parallel = tensor_parallel
        tensor_parallel.check_length(x_BSH.shape[SEQUENCE_DIM])
        return tensor_parallel.shard(x_BSH, dim=SEQUENCE_DIM).contiguous()

    @staticmethod
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor, None]:
        return start_gather(grad_BSH, ctx.tensor_parallel, dim=SEQUENCE_DIM).wait(), None
