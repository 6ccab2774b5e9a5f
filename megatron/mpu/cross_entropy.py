"""Cross entropy over logits whose vocabulary may be split over the tensor ranks. Used by `megatron.model.loss`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron.mpu.tensor_parallel import TensorParallel


def vocab_parallel_cross_entropy(
    logits_BSV: torch.Tensor, labels_BS: torch.Tensor, tensor_parallel: TensorParallel
) -> torch.Tensor:
    """Return each token's -log softmax(logits)[label] as fp32 losses_BS; logits may be of any floating dtype.

    logits_BSV are this rank's equal part of the vocabulary, labels_BS ids of the whole. With several ranks it is
    collective over the tensor group in forward; three fp32 numbers a token are exchanged, not the logits.

    Keeps one fp32 tensor of the logits' size for backward, which turns it into the gradient in place: a second backward
    through the same graph raises. On a CPU this takes less than half of the time of `F.cross_entropy`, which computes
    the exponentials twice and allocates once more.
    """
    losses_BS: torch.Tensor
    if tensor_parallel.size == 1:
        losses_BS = _CrossEntropy.apply(logits_BSV, labels_BS)
    else:
        losses_BS = _SplitCrossEntropy.apply(logits_BSV, labels_BS, tensor_parallel)
    return losses_BS


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        logits_BSV_fp32 = logits_BSV.float()
        probabilities_BSV = torch.softmax(logits_BSV_fp32, dim=-1)
        # The log of the softmax's denominator, read off the likeliest token: no further exponential, and never log(0).
        log_partition_BS = logits_BSV_fp32.amax(-1) - probabilities_BSV.amax(-1).log()
        labels_BS1 = labels_BS.unsqueeze(-1)
        ctx.save_for_backward(probabilities_BSV, labels_BS1)
        ctx.logits_dtype = logits_BSV.dtype
        return log_partition_BS - logits_BSV_fp32.gather(-1, labels_BS1).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses_BS: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad_BSV, labels_BS1 = ctx.saved_tensors
        grad_BSV.scatter_add_(-1, labels_BS1, grad_BSV.new_full((1, 1, 1), -1.0).expand_as(labels_BS1))
        return grad_BSV.mul_(grad_losses_BS.unsqueeze(-1)).to(ctx.logits_dtype), None


class _SplitCrossEntropy(torch.autograd.Function):
    """Backward needs no communication: softmax - one-hot, each rank for its part of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits_BSV: torch.Tensor, labels_BS: torch.Tensor, tensor_parallel: TensorParallel
    ) -> torch.Tensor:
        vocab_size, group = logits_BSV.shape[-1], tensor_parallel.group
        local_labels_BS = labels_BS - tensor_parallel.rank * vocab_size
        is_here_BS = (local_labels_BS >= 0) & (local_labels_BS < vocab_size)
        labels_BS1 = local_labels_BS.masked_fill(~is_here_BS, 0).unsqueeze(-1)
        max_BS = logits_BSV.amax(-1).float()
        dist.all_reduce(max_BS, op=dist.ReduceOp.MAX, group=group)
        shifted_BSV = logits_BSV.float() - max_BS.unsqueeze(-1)
        target_BS = shifted_BSV.gather(-1, labels_BS1).squeeze(-1) * is_here_BS
        exponentials_BSV = shifted_BSV.exp_()
        sums_2BS = torch.stack((exponentials_BSV.sum(-1), target_BS))
        dist.all_reduce(sums_2BS, group=group)
        partition_BS, target_BS = sums_2BS
        probabilities_BSV = exponentials_BSV.div_(partition_BS.unsqueeze(-1))
        ctx.save_for_backward(probabilities_BSV, labels_BS1, is_here_BS)
        ctx.logits_dtype = logits_BSV.dtype
        return partition_BS.log() - target_BS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses_BS: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad_BSV, labels_BS1, is_here_BS = ctx.saved_tensors
        grad_BSV.scatter_add_(-1, labels_BS1, -is_here_BS.unsqueeze(-1).to(grad_BSV.dtype))
        return grad_BSV.mul_(grad_losses_BS.unsqueeze(-1)).to(ctx.logits_dtype), None, None
