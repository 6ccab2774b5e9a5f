"""The layers whose weights are split over the tensor ranks: two linears and the vocabulary embedding.

`megatron.model` builds everything with split weights from these and never asks how many tensor ranks there are. At size
1 they are plain `F.linear` and `F.embedding`. Values are drawn for the full weight and then sliced, so that a model
starts from the same numbers whatever its tensor size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from megatron.mpu.column_linear import column_linear
from megatron.mpu.mappings import sum_into_residual
from megatron.mpu.tensor_parallel import Placement, TensorParallel

InitMethod = Callable[[torch.Tensor, torch.Generator], None]
"""Fills a full weight in place from a generator."""


class ColumnParallelLinear(nn.Module):
    """`y_O = x_I @ weight_OI.T + bias_O` with the output features O split over the tensor ranks.

    `num_fused` > 1 says that the weight is that many equal matrices on top of each other, each split by itself: rank r
    holds part r of every one of them, in the same order (gate and up projection of a gated MLP). With sequence
    parallelism x is this rank's part of the sequence and is gathered first.

    Raises ConfigError when the rows cannot be divided.
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
        self.tensor_parallel = tensor_parallel
        self.init_method = init_method
        self.num_fused = num_fused
        self.full_shape = (out_features, in_features)
        rows_of_each = tensor_parallel.share_of("number of output features", out_features // num_fused)
        local_out_features = num_fused * rows_of_each
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
        """Map (B, S, in_features) to this rank's (B, S, out_features / size), S being whole in the output."""
        return column_linear(x, self.weight, self.bias, self.tensor_parallel)

    def placements(self) -> Mapping[str, Placement]:
        """Rows are split."""
        return dict.fromkeys(("weight", "bias"), Placement(split_dim=0, num_fused=self.num_fused))


class RowParallelLinear(nn.Module):
    """`y_O = x_I @ weight_OI.T + bias_O` with the input features I split over the tensor ranks.

    The bias is whole on every rank and is added once, to the summed output. With sequence parallelism each rank gets
    its part of the sequence of that sum.

    Raises ConfigError when the columns cannot be divided.
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
        self.tensor_parallel = tensor_parallel
        self.init_method = init_method
        self.full_shape = (out_features, in_features)
        local_in_features = tensor_parallel.share_of("number of input features", in_features)
        self.weight = nn.Parameter(torch.empty(out_features, local_in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def draw_parameters(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Draw the full weight, keep this rank's columns; zero the bias."""
        full = draw_full(self.full_shape, self.init_method, generator_of("weight"))
        fill(self.weight, self.tensor_parallel.shard(full, dim=1))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map this rank's (B, S, in_features / size) to (B, S, out_features), or its part of that along S."""
        if self.tensor_parallel.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = sum_into_residual(F.linear(x, self.weight), self.tensor_parallel)
        return y if self.bias is None else y + self.bias

    def placements(self) -> Mapping[str, Placement]:
        """Columns are split; the bias is whole, and under sequence parallelism sees a part of the sequence."""
        return {
            "weight": Placement(split_dim=1),
            "bias": Placement(partial_gradient=self.tensor_parallel.splits_sequence),
        }


class VocabParallelEmbedding(nn.Module):
    """A table of `num_embeddings` vectors with the rows (the vocabulary) split over the tensor ranks.

    Raises ConfigError when the rows cannot be divided.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        tensor_parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.init_method = init_method
        self.full_shape = (num_embeddings, embedding_dim)
        num_local_embeddings = tensor_parallel.share_of("number of embeddings", num_embeddings)
        self.weight = nn.Parameter(torch.empty(num_local_embeddings, embedding_dim))

    def draw_parameters(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Draw the full table, keep this rank's rows."""
        full = draw_full(self.full_shape, self.init_method, generator_of("weight"))
        fill(self.weight, self.tensor_parallel.shard(full, dim=0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map integer tokens (B, S) to what this rank's rows add to (B, S, embedding_dim).

        The sum over the ranks is the caller's: before positions are added it wants the whole, otherwise its part.
        """
        if self.tensor_parallel.size == 1:
            return F.embedding(tokens, self.weight)
        num_rows = self.weight.shape[0]
        rows = tokens - self.tensor_parallel.rank * num_rows
        elsewhere = (rows < 0) | (rows >= num_rows)
        vectors = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return vectors.masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    def placements(self) -> Mapping[str, Placement]:
        """Rows are split."""
        return {"weight": Placement(split_dim=0)}


def draw_full(shape: tuple[int, int], init_method: InitMethod, generator: torch.Generator) -> torch.Tensor:
    """Draw a full weight in fp32 on the CPU, whatever device and dtype it ends on: the same numbers everywhere."""
    full = torch.empty(shape, dtype=torch.float32, device="cpu")
    init_method(full, generator)
    return full


def fill(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Overwrite a parameter's values, with a cast to its dtype and device."""
    with torch.no_grad():
        parameter.copy_(values)
