"""The layers around the blocks: embedding first, final norm and head last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.model.dropout import residual_dropout
from megatron.model.init import input_init_method
from megatron.model.kv_cache import KVCache
from megatron.model.norms import build_norm
from megatron.model.positions import LearnedPositions, SinusoidalPositions
from megatron.mpu.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.mpu.mappings import scatter_sequence, sum_into_residual, sum_over_ranks
from megatron.mpu.tensor_parallel import Placement, TensorParallel, partial_gradients

if TYPE_CHECKING:
    from megatron.neox_arguments.model import ModelArgs


class Embedding(nn.Module):
    """Token vectors, plus learned or sinusoidal position vectors where `pos_emb` says so, then `hidden_dropout`."""

    def __init__(self, args: ModelArgs, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.hidden_dropout = args.hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size(args),
            args.hidden_size,
            init_method=input_init_method(args),
            tensor_parallel=tensor_parallel,
        )
        self.position_embeddings = _build_position_embeddings(args)

    def forward(self, tokens_BS: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Map tokens_BS to x_BSH, S being this tensor rank's part of the sequence with sequence parallelism.

        With a cache, positions go on from those it holds.
        """
        x_BSH = self.word_embeddings(tokens_BS)
        if self.position_embeddings is None:
            x_BSH = sum_into_residual(x_BSH, self.tensor_parallel)
        else:
            start = 0 if cache is None else cache.num_tokens
            positions_SH = self.position_embeddings(start, tokens_BS.shape[1]).to(x_BSH.dtype)
            # Positions are added to the whole sequence, so that their table has its whole gradient on every rank.
            x_BSH = scatter_sequence(sum_over_ranks(x_BSH, self.tensor_parallel) + positions_SH, self.tensor_parallel)
        return residual_dropout(
            x_BSH, self.hidden_dropout, training=self.training, tensor_parallel=self.tensor_parallel
        )


class FinalNorm(nn.Module):
    """The norm between the last block and the head."""

    def __init__(self, args: ModelArgs, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.norm = build_norm(args, args.hidden_size)

    def forward(self, x_BSH: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Map x_BSH to x_BSH."""
        y_BSH: torch.Tensor = self.norm(x_BSH)
        return y_BSH

    def placements(self) -> Mapping[str, Placement]:
        """With sequence parallelism the norm sees a part of the sequence."""
        return partial_gradients(self, "norm") if self.tensor_parallel.splits_sequence else {}


class Head(nn.Module):
    """Projects the residual stream to the padded vocabulary, without bias."""

    def __init__(self, args: ModelArgs, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.final_linear = ColumnParallelLinear(
            args.hidden_size,
            padded_vocab_size(args),
            bias=False,
            init_method=input_init_method(args),
            tensor_parallel=tensor_parallel,
        )

    def forward(self, x_BSH: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Map x_BSH to logits_BSV, V being this tensor rank's part of the vocabulary, S the whole sequence."""
        logits_BSV: torch.Tensor = self.final_linear(x_BSH)
        return logits_BSV


def padded_vocab_size(args: ModelArgs) -> int:
    """Return the vocabulary with its padding. Raises ConfigError when no tokenizer has given it yet."""
    if not args.padded_vocab_size:
        raise ConfigError("padded_vocab_size is not known: it follows from the tokenizer, or set it")
    return args.padded_vocab_size


def _build_position_embeddings(args: ModelArgs) -> LearnedPositions | SinusoidalPositions | None:
    if args.pos_emb == "learned":
        return LearnedPositions(
            args.max_position_embeddings,
            args.hidden_size,
            offset=args.opt_pos_emb_offset,
            init_method=input_init_method(args),
        )
    if args.pos_emb == "sinusoidal":
        return SinusoidalPositions(args.hidden_size)
    return None
