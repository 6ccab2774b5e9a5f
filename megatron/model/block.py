"""One transformer block: norms, attention, MLP, and how they meet the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.model.attention import SelfAttention
from megatron.model.dropout import residual_dropout
from megatron.model.kv_cache import KVCache
from megatron.model.mlp import MLP
from megatron.model.norms import build_norm
from megatron.mpu.tensor_parallel import Placement, TensorParallel, partial_gradients

if TYPE_CHECKING:
    from megatron.neox_arguments.model import ModelArgs


class Block(nn.Module):
    """Pre-norm block.

    - serial: h = x + attention(input_layernorm(x)), then h + mlp(post_attention_layernorm(h))
    - `gpt_j_residual`: x + attention(input_layernorm(x)) + mlp(post_attention_layernorm(x))
    - `gpt_j_residual` and `gpt_j_tied`: both read input_layernorm(x), and there is no second norm, as in GPT-J

    `hidden_dropout` falls on each of the two before the sum. With sequence parallelism S is this tensor rank's part of
    the sequence in everything but attention and MLP.
    """

    def __init__(self, args: ModelArgs, layer_index: int, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.parallel_residual = args.gpt_j_residual
        self.hidden_dropout = args.hidden_dropout
        shared_norm = args.gpt_j_residual and args.gpt_j_tied
        self.input_layernorm = build_norm(args, args.hidden_size)
        self.attention = SelfAttention(args, layer_index, tensor_parallel)
        self.post_attention_layernorm = None if shared_norm else build_norm(args, args.hidden_size)
        self.mlp = MLP(args, tensor_parallel)

    def forward(self, x_BSH: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Map x_BSH to the next residual x_BSH."""
        normed_BSH = self.input_layernorm(x_BSH)
        attended_BSH = self._dropout(self.attention(normed_BSH, cache))
        if not self.parallel_residual:
            x_BSH = x_BSH + attended_BSH
        if self.post_attention_layernorm is not None:
            normed_BSH = self.post_attention_layernorm(x_BSH)
        y_BSH = x_BSH + self._dropout(self.mlp(normed_BSH))
        return y_BSH + attended_BSH if self.parallel_residual else y_BSH

    def placements(self) -> Mapping[str, Placement]:
        """With sequence parallelism the norms see a part of the sequence."""
        if not self.tensor_parallel.splits_sequence:
            return {}
        return partial_gradients(self, "input_layernorm", "post_attention_layernorm")

    def _dropout(self, x_BSH: torch.Tensor) -> torch.Tensor:
        return residual_dropout(
            x_BSH, self.hidden_dropout, training=self.training, tensor_parallel=self.tensor_parallel
        )
