"""The feed-forward half of a block, plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.init import input_init_method, output_init_method
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from megatron.neox_arguments.model import ModelArgs

Activation = Callable[[torch.Tensor], torch.Tensor]

PLAIN_ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "softsign": F.softsign,
    "swish": F.silu,
    "silu": F.silu,
    "mish": F.mish,
}


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


GATE_ACTIVATIONS: dict[str, Activation] = {
    "geglu": F.gelu,
    "reglu": F.relu,
    "swiglu": F.silu,
    "glu": torch.sigmoid,
    "bilinear": _identity,
}
"""What is applied to the gate of a gated linear unit (Shazeer 2020, arXiv:2002.05202)."""


class MLP(nn.Module):
    """`dense_4h_to_h(act(dense_h_to_4h(x)))`, or gated `dense_4h_to_h(act(gate(x)) * up(x))`; inner size F.

    F is `ffn_hidden_size`. A gated MLP computes both projections in one matmul: `dense_h_to_4h.weight` is (2 F, H) and
    seen as (2, F, H) holds the gate at 0 and the up projection at 1 (the bias alike). Each of t tensor ranks holds
    F / t consecutive rows of both.
    """

    def __init__(self, args: ModelArgs, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.gate_activation = GATE_ACTIVATIONS.get(args.activation)
        self.activation = PLAIN_ACTIVATIONS.get(args.activation, _identity)
        num_fused = 1 if self.gate_activation is None else 2
        self.dense_h_to_4h = ColumnParallelLinear(
            args.hidden_size,
            num_fused * args.ffn_hidden_size,
            bias=args.use_bias_in_mlp,
            init_method=input_init_method(args),
            tensor_parallel=tensor_parallel,
            num_fused=num_fused,
        )
        self.dense_4h_to_h = RowParallelLinear(
            args.ffn_hidden_size,
            args.hidden_size,
            bias=args.use_bias_in_mlp,
            init_method=output_init_method(args),
            tensor_parallel=tensor_parallel,
        )

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Map x_BSH to y_BSH; the residual is the block's."""
        inner_BSF = self.dense_h_to_4h(x_BSH)
        if self.gate_activation is None:
            return self.dense_4h_to_h(self.activation(inner_BSF))
        gate_BSF, up_BSF = inner_BSF.chunk(2, dim=-1)
        return self.dense_4h_to_h(self.gate_activation(gate_BSF) * up_BSF)
