"""The decoder as a flat list of layers, and the module that runs a stage's share of it.

Layer 0 is the embedding, 1 .. num_layers are the blocks, then come the final norm and the head. A parameter is named
`layers.<index>.<...>` by its place in the whole list, so names do not change with the number of stages. Activations are
batch first (B S H), which is what attention wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.model.block import Block
from megatron.model.ends import Embedding, FinalNorm, Head
from megatron.model.init import initialize
from megatron.model.kv_cache import KVCache
from megatron.mpu.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from megatron.neox_arguments.model import ModelArgs

LayerKind = Literal["embedding", "block", "final_norm", "head"]

EMBEDDING_WEIGHT = "word_embeddings.weight"
HEAD_WEIGHT = "final_linear.weight"


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the list, not built yet: any process can build any of them, at no cost for the others."""

    index: int
    kind: LayerKind
    args: ModelArgs
    seed: int
    tensor_parallel: TensorParallel

    def build(self) -> nn.Module:
        """Return the layer with its starting values, on the current default device (on meta: without values).

        Called as `layer(x, cache)`; takes tokens_BS (embedding) or x_BSH and returns x_BSH or logits_BSV (head).
        """
        module = self._construct()
        self.initialize(module)
        return module

    def initialize(self, module: nn.Module) -> None:
        """Overwrite the layer's parameters with their starting values, as after `to_empty` of a meta build."""
        initialize(module, seed=self.seed, parameter_name=self.parameter_name)

    def parameter_name(self, local_name: str) -> str:
        """Return the whole model's name of a parameter of this layer; a tied head's weight is the embedding's."""
        if self.kind == "head" and local_name == self.tied_weight:
            return f"layers.0.{EMBEDDING_WEIGHT}"
        return f"layers.{self.index}.{local_name}"

    @property
    def tied_weight(self) -> str | None:
        """The local name of the weight that embedding and head share, in either of the two where they do."""
        if self.args.no_weight_tying:
            return None
        return {"embedding": EMBEDDING_WEIGHT, "head": HEAD_WEIGHT}.get(self.kind)

    @property
    def is_tied_head(self) -> bool:
        """Whether this is a head whose weight is the embedding's, which counts once however many stages hold it."""
        return self.kind == "head" and self.tied_weight is not None

    def _construct(self) -> nn.Module:
        if self.kind == "embedding":
            return Embedding(self.args, self.tensor_parallel)
        if self.kind == "block":
            return Block(self.args, self.index, self.tensor_parallel)
        if self.kind == "final_norm":
            return FinalNorm(self.args, self.tensor_parallel)
        return Head(self.args, self.tensor_parallel)


def decoder_layers(args: ModelArgs, *, seed: int, tensor_parallel: TensorParallel) -> list[LayerSpec]:
    """Return the whole decoder as num_layers + 3 specs; a stage builds a consecutive run of them.

    Raises ConfigError when a sequence that is to be split cannot be; building a layer raises it for weights.
    """
    if tensor_parallel.splits_sequence:
        tensor_parallel.share_of("seq_length", args.seq_length)

    def spec(index: int, kind: LayerKind) -> LayerSpec:
        return LayerSpec(index, kind, args, seed, tensor_parallel)

    blocks = [spec(index, "block") for index in range(1, args.num_layers + 1)]
    return [
        spec(0, "embedding"),
        *blocks,
        spec(args.num_layers + 1, "final_norm"),
        spec(args.num_layers + 2, "head"),
    ]


class Decoder(nn.Module):
    """Builds and runs one stage's consecutive layers; with all of them, the whole decoder.

    Where embedding and tied head are both here they share one Parameter; where one of them is, `weight_of_other_stage`
    is the name of a Parameter of which the last or first stage has a copy that must stay the same. With
    `checkpoint_activations` the blocks are recomputed in backward, `checkpoint_num_layers` of them at a time, counted
    from the stage's first.
    """

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(spec.index): spec.build() for spec in specs})
        self.weight_of_other_stage = self._tie_head(specs)
        self._specs = tuple(specs)
        args = specs[0].args
        self.hidden_size = args.hidden_size
        self.recomputes = args.checkpoint_activations
        tensor_parallel = specs[0].tensor_parallel
        self.num_sequence_shards = tensor_parallel.size if tensor_parallel.splits_sequence else 1
        self.has_dropout = args.hidden_dropout > 0 or args.attention_dropout > 0
        blocks = [spec.index for spec in specs if spec.kind == "block"]
        self.before_blocks = [str(spec.index) for spec in specs if spec.kind == "embedding"]
        self.block_segments = [
            [str(index) for index in blocks[first : first + args.checkpoint_num_layers]]
            for first in range(0, len(blocks), args.checkpoint_num_layers)
        ]
        self.after_blocks = [str(spec.index) for spec in specs if spec.kind in ("final_norm", "head")]

    def forward(self, x: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Map tokens_BS (or the previous stage's x_BSH) to logits_BSV (or x_BSH for the next stage).

        With a cache, the tokens follow those it holds; call it without gradients. Raises ValueError for a cache with
        sequence parallelism, which cannot split the single token of a step. `gather_logits` makes logits_BSV, a tensor
        rank's part of the vocabulary, whole.
        """
        if cache is not None and self.num_sequence_shards > 1:
            raise ValueError("a key/value cache cannot be used with sequence parallelism: build the decoder without it")
        recompute = self.recomputes and cache is None and torch.is_grad_enabled()
        num_tokens = x.shape[1]
        x = self._run(self.before_blocks, x, cache)
        for segment in self.block_segments:
            if recompute:
                # The random streams of tensor ranks follow from the default one, so replaying that replays all.
                x = checkpoint(self._run, segment, x, use_reentrant=False, preserve_rng_state=self.has_dropout)
            else:
                x = self._run(segment, x, cache)
        x = self._run(self.after_blocks, x, cache)
        if cache is not None:
            cache.advance(num_tokens)
        return x

    def model_names(self) -> dict[str, str]:
        """Return the whole model's name of each parameter by its name here; only a tied head's weight has another."""
        return {
            f"layers.{spec.index}.{local_name}": spec.parameter_name(local_name)
            for spec in self._specs
            for local_name, _ in self.layers[str(spec.index)].named_parameters()
        }

    def _run(self, names: list[str], x: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        for name in names:
            x = self.layers[name](x, cache)
        return x

    def synthetic_input(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return what `forward` takes where the model takes `tokens_BS`: those, or random x_BSH."""
        if self.before_blocks:
            return tokens_BS
        batch_size, length = tokens_BS.shape
        shape = (batch_size, length // self.num_sequence_shards, self.hidden_size)
        dtype = next(self.parameters()).dtype
        return torch.randn(shape, dtype=dtype, device=tokens_BS.device).requires_grad_()

    def _tie_head(self, specs: Sequence[LayerSpec]) -> str | None:
        """Let embedding and head share a weight where both are here; return its name where another stage has a copy."""
        tied = [spec for spec in specs if spec.tied_weight is not None]
        if len(tied) == 2:
            embedding, head = (self.layers[str(spec.index)] for spec in tied)
            assert isinstance(embedding, Embedding) and isinstance(head, Head)
            head.final_linear.weight = embedding.word_embeddings.weight
        return f"layers.{tied[0].index}.{tied[0].tied_weight}" if len(tied) == 1 else None
