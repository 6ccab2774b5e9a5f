"""Dropout on the residual stream, and on what is about to be added to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.mpu.random_state import rank_random_stream
from megatron.mpu.tensor_parallel import TensorParallel


def residual_dropout(
    x_BSH: torch.Tensor, probability: float, *, training: bool, tensor_parallel: TensorParallel
) -> torch.Tensor:
    """Return F.dropout of x_BSH: with one mask where all tensor ranks hold the same x_BSH, else with each its own."""
    if probability == 0 or not training:
        return x_BSH
    if not tensor_parallel.splits_sequence:
        return F.dropout(x_BSH, probability)
    with rank_random_stream(tensor_parallel, x_BSH.device):
        return F.dropout(x_BSH, probability)
