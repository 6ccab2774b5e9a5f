"""The language-model loss of a micro-batch."""

from __future__ import annotations

import torch

from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.tensor_parallel import NOT_SPLIT, TensorParallel


def lm_loss(
    logits_BSV: torch.Tensor,
    labels_BS: torch.Tensor,
    loss_mask_BS: torch.Tensor,
    *,
    tensor_parallel: TensorParallel = NOT_SPLIT,
) -> torch.Tensor:
    """Return the mean cross entropy, in nats, over the tokens whose mask is 1, as an fp32 scalar (0 if there are none).

    Labels are the next tokens: the data shifts them, not the loss. Labels under a zero mask must still be valid token
    ids. Logits come from `Decoder` of the same `tensor_parallel`.
    """
    losses_BS = vocab_parallel_cross_entropy(logits_BSV, labels_BS, tensor_parallel)
    mask_BS = loss_mask_BS.to(losses_BS.dtype)
    return (losses_BS * mask_BS).sum() / mask_BS.sum().clamp(min=1.0)
