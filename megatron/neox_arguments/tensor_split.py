"""Whether a model can be split over `model_parallel_size` tensor ranks, known before any process starts."""

from __future__ import annotations

from megatron.neox_arguments.model import ModelArgs
from megatron.neox_arguments.parallelism import ParallelismArgs


def problems_of_split(model: ModelArgs, parallelism: ParallelismArgs) -> list[str]:
    """Return a line for each size of the model that tensor ranks cannot share equally. Both sections are derived."""
    size = parallelism.model_parallel_size
    sizes = [
        ("num_attention_heads", model.num_attention_heads, "each tensor rank has whole heads"),
        ("num_kv_heads", model.num_kv_heads, "each tensor rank has whole key and value heads"),
        ("ffn_hidden_size", model.ffn_hidden_size, "each tensor rank has an equal part of the MLP's width"),
    ]
    if model.padded_vocab_size:
        sizes.append(("padded_vocab_size", model.padded_vocab_size, "each tensor rank has an equal part of it"))
    if parallelism.sequence_parallel:
        sizes.append(("seq_length", model.seq_length, "sequence_parallel gives each tensor rank an equal part of it"))
    return [
        f"{name} {value} is not a multiple of model_parallel_size {size}: {reason}"
        for name, value, reason in sizes
        if value % size
    ]


def notices_of_split(parallelism: ParallelismArgs) -> list[str]:
    """Return what to say about values that have no effect."""
    if parallelism.sequence_parallel and parallelism.model_parallel_size == 1:
        return ["sequence_parallel: without effect, as there is one tensor rank (model_parallel_size 1)"]
    return []
