"""Causal self-attention: grouped queries, rotary or ALiBi positions, sliding window, key/value cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.init import input_init_method, output_init_method
from megatron.model.kv_cache import KVCache
from megatron.model.norms import build_norm
from megatron.model.positions import Float32Table, Rotary, alibi_slopes
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.random_state import rank_random_stream
from megatron.mpu.tensor_parallel import Placement, TensorParallel, partial_gradients

if TYPE_CHECKING:
    from megatron.neox_arguments.model import ModelArgs


class SelfAttention(nn.Module):
    """Queries of N heads attend to G = `num_kv_heads` key/value heads, Q = N / G queries to each.

    `query_key_value.weight` has G (Q + 2) D rows and seen as (G, Q + 2, D, H) holds, for key/value head g, the query
    heads g Q .. (g + 1) Q - 1, then the key, then the value (the bias alike). Each of t tensor ranks holds G / t
    consecutive groups, an equal run of dim 0. With G = N this is transformers' GPTNeoX layout: query, key and value of
    one head after another. `dense.weight` is (H, N D), its dim 1 in head order and split alike.

    With `use_qk_layernorm` queries and keys are normed over the features of each head, before rotation, by one norm for
    all queries and one for all keys (Dehghani et al. 2023, arXiv:2302.05442), so nothing depends on the tensor size.
    Attention is `scaled_dot_product_attention` at scale 1 / sqrt(D), whose scores and softmax are fp32.

    Raises ConfigError when the heads cannot be divided over the tensor ranks.
    """

    def __init__(self, args: ModelArgs, layer_index: int, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        tensor_parallel.share_of("num_attention_heads", args.num_attention_heads)
        tensor_parallel.share_of("num_kv_heads", args.num_kv_heads)
        self.tensor_parallel = tensor_parallel
        self.layer_index = layer_index
        self.head_dim = args.hidden_size // args.num_attention_heads
        self.queries_per_group = args.num_attention_heads // args.num_kv_heads
        self.window = args.sliding_window_width
        self.dropout = args.attention_dropout
        self.query_key_value = ColumnParallelLinear(
            args.hidden_size,
            (args.num_attention_heads + 2 * args.num_kv_heads) * self.head_dim,
            bias=args.use_bias_in_attn_linear,
            init_method=input_init_method(args),
            tensor_parallel=tensor_parallel,
        )
        self.dense = RowParallelLinear(
            args.num_attention_heads * self.head_dim,
            args.hidden_size,
            bias=args.use_bias_in_attn_linear,
            init_method=output_init_method(args),
            tensor_parallel=tensor_parallel,
        )
        self.query_norm = build_norm(args, self.head_dim) if args.use_qk_layernorm else None
        self.key_norm = build_norm(args, self.head_dim) if args.use_qk_layernorm else None
        self.rotary: Rotary | None = None
        if args.pos_emb == "rotary":
            self.rotary = Rotary(int(self.head_dim * args.rotary_pct), base=args.rotary_emb_base)
        self.alibi: Float32Table | None = None
        if args.pos_emb == "alibi":
            self.alibi = Float32Table(partial(_local_alibi_slopes, args.num_attention_heads, tensor_parallel))

    def forward(self, x_BSH: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Map x_BSH to y_BSH. With a cache, the S tokens follow those it holds, and are added to it."""
        start = 0 if cache is None else cache.num_tokens
        q_BNSD, k_BGSD, v_BGSD = self._project(x_BSH, start)
        if cache is not None:
            k_BGSD, v_BGSD = cache.extend(self.layer_index, k_BGSD, v_BGSD)
        y_BNSD = self._attend(q_BNSD, k_BGSD, v_BGSD, start)
        y: torch.Tensor = self.dense(y_BNSD.transpose(1, 2).flatten(2))
        return y

    def placements(self) -> Mapping[str, Placement]:
        """The norms of queries and keys see this tensor rank's heads only."""
        return {} if self.tensor_parallel.size == 1 else partial_gradients(self, "query_norm", "key_norm")

    def _project(self, x_BSH: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads_per_group = self.queries_per_group + 2
        qkv_BSGPD = self.query_key_value(x_BSH).unflatten(-1, (-1, heads_per_group, self.head_dim))
        qk_BSGPD, v_BSG1D = qkv_BSGPD.split((heads_per_group - 1, 1), dim=3)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = qk_BSGPD.split((self.queries_per_group, 1), dim=3)
            qk_BSGPD = torch.cat((self.query_norm(q), self.key_norm(k)), dim=3)
        if self.rotary is not None:
            qk_BSGPD = self.rotary(qk_BSGPD, start)
        q_BSGQD, k_BSG1D = qk_BSGPD.split((self.queries_per_group, 1), dim=3)
        q_BSND, k_BSGD, v_BSGD = q_BSGQD.flatten(2, 3), k_BSG1D.squeeze(3), v_BSG1D.squeeze(3)
        return q_BSND.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2)

    def _attend(self, q_BNSD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, start: int) -> torch.Tensor:
        """Attend from S queries at positions start .. start + S to the T = start + S keys up to each of them."""
        num_queries, num_keys = q_BNSD.shape[2], k_BGTD.shape[2]
        if self.window is not None and num_queries == 1:
            k_BGTD, v_BGTD = k_BGTD[:, :, -self.window :], v_BGTD[:, :, -self.window :]
            num_keys = k_BGTD.shape[2]
        within_window = self.window is None or num_keys <= self.window
        mask = None
        if self.alibi is not None:
            mask = alibi_bias(self.alibi.table, num_queries, num_keys, self.window).to(q_BNSD.dtype)
        elif num_queries > 1 and (start > 0 or not within_window):
            mask = causal_mask(num_queries, num_keys, self.window, q_BNSD.device)
        attend = partial(
            F.scaled_dot_product_attention,
            q_BNSD,
            k_BGTD,
            v_BGTD,
            attn_mask=mask,
            is_causal=mask is None and num_queries > 1,
            enable_gqa=self.queries_per_group > 1,
        )
        if self.dropout == 0 or not self.training:
            return attend()
        with rank_random_stream(self.tensor_parallel, q_BNSD.device):
            return attend(dropout_p=self.dropout)


def key_distances(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """Return position of key - position of query as (S, T), where the last query stands at the last key."""
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)
    return torch.arange(num_keys, device=device) - queries.unsqueeze(-1)


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return the (S, T) mask that is true where a query sees a key: itself and the window - 1 before it (all: None)."""
    distances_ST = key_distances(num_queries, num_keys, device)
    seen_ST = distances_ST <= 0
    return seen_ST if window is None else seen_ST & (distances_ST > -window)


def alibi_bias(slopes_N: torch.Tensor, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
    """Return what ALiBi adds to the scores, as fp32 (1, N, S, T): slope x distance (<= 0), -inf where unseen."""
    distances_ST = key_distances(num_queries, num_keys, slopes_N.device)
    unseen_ST = ~causal_mask(num_queries, num_keys, window, slopes_N.device)
    biases_ST = distances_ST.to(slopes_N.dtype).masked_fill(unseen_ST, -math.inf)
    return slopes_N[None, :, None, None] * biases_ST


def _local_alibi_slopes(num_heads: int, tensor_parallel: TensorParallel, device: torch.device | None) -> torch.Tensor:
    slopes_N = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device=device)
    return tensor_parallel.shard(slopes_N, dim=0)
