"""The layers whose weights are split over the tensor ranks: two linears and the vocabulary embedding.

`megatron.model` builds everything with split weights from these and never asks how many tensor ranks there are. At size
1 they are plain `F.linear` and `F.embedding`. Values are drawn for the full weight and then sliced, so that a model
starts from the same numbers whatever its tensor size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from megatron.errors import ConfigError
from megatron.mpu.tensor_parallel import TensorParallel

InitMethod = Callable[[torch.Tensor, torch.Generator], None]
"""Fills a full weight in place from a generator."""


class ColumnParallelLinear(nn.Module):
    """`y_O = x_I @ weight_OI.T + bias_O` with the output features O split over the tensor ranks.

    `num_fused` > 1 says that the weight is that many equal matrices on top of each other, each split by itself: rank r
    holds part r of every one of them, in the same order (gate and up projection of a gated MLP).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init_method: InitMethod,
        tensor_parallel: TensorParallel,
        num_fused: int = 1,
    ) -> None:
        super().__init__()
        refuse_split(tensor_parallel)
        self.tensor_parallel = tensor_parallel
        self.init_method = init_method
        self.num_fused = num_fused
        self.full_shape = (out_features, in_features)
        local_out_features = out_features // tensor_parallel.size
        self.weight = nn.Parameter(torch.empty(local_out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(local_out_features)) if bias else None

    def draw_parameters(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Draw the full weight, keep this rank's rows; zero the bias."""
        out_features, in_features = self.full_shape
        full = draw_full(self.full_shape, self.init_method, generator_of("weight"))
        fused = full.view(self.num_fused, out_features // self.num_fused, in_features)
        fill(self.weight, self.tensor_parallel.shard(fused, dim=1).reshape(-1, in_features))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to this rank's (..., out_features / size)."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """`y_O = x_I @ weight_OI.T + bias_O` with the input features I split over the tensor ranks.

    The bias is whole on every rank and is added once, to the summed output.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init_method: InitMethod,
        tensor_parallel: TensorParallel,
    ) -> None:
        super().__init__()
        refuse_split(tensor_parallel)
        self.tensor_parallel = tensor_parallel
        self.init_method = init_method
        self.full_shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features // tensor_parallel.size))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def draw_parameters(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Draw the full weight, keep this rank's columns; zero the bias."""
        full = draw_full(self.full_shape, self.init_method, generator_of("weight"))
        fill(self.weight, self.tensor_parallel.shard(full, dim=1))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map this rank's (..., in_features / size) to the whole (..., out_features)."""
        return F.linear(x, self.weight, self.bias)


class VocabParallelEmbedding(nn.Module):
    """A table of `num_embeddings` vectors with the rows (the vocabulary) split over the tensor ranks."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, init_method: InitMethod, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        refuse_split(tensor_parallel)
        self.tensor_parallel = tensor_parallel
        self.init_method = init_method
        self.full_shape = (num_embeddings, embedding_dim)
        self.weight = nn.Parameter(torch.empty(num_embeddings // tensor_parallel.size, embedding_dim))

    def draw_parameters(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Draw the full table, keep this rank's rows."""
        full = draw_full(self.full_shape, self.init_method, generator_of("weight"))
        fill(self.weight, self.tensor_parallel.shard(full, dim=0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map integer (...) to (..., embedding_dim), whole on every rank."""
        return F.embedding(tokens, self.weight)


def draw_full(shape: tuple[int, int], init_method: InitMethod, generator: torch.Generator) -> torch.Tensor:
    """Draw a full weight in fp32 on the CPU, whatever device and dtype it ends on: the same numbers everywhere."""
    full = torch.empty(shape, dtype=torch.float32, device="cpu")
    init_method(full, generator)
    return full


def fill(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Overwrite a parameter's values, with a cast to its dtype and device."""
    with torch.no_grad():
        parameter.copy_(values)


def refuse_split(tensor_parallel: TensorParallel) -> None:
    """Raise ConfigError for a tensor size these layers cannot be split to yet."""
    if tensor_parallel.size != 1:
        raise ConfigError(
            f"model_parallel_size is {tensor_parallel.size}: layers split over tensor ranks are not supported yet, "
            f"set model_parallel_size: 1"
        )
