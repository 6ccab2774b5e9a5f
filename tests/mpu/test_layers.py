"""The split layers at tensor size 1, and what they say to a larger one."""

import pytest
import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.mpu.tensor_parallel import NOT_SPLIT, TensorParallel


def init_method(weight, generator):
    weight.normal_(generator=generator)


def generator_of(name):
    return torch.Generator().manual_seed(len(name))


def build(kind, tensor_parallel=NOT_SPLIT):
    if kind is VocabParallelEmbedding:
        return VocabParallelEmbedding(12, 8, init_method=init_method, tensor_parallel=tensor_parallel)
    return kind(8, 12, bias=True, init_method=init_method, tensor_parallel=tensor_parallel)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_linear_is_torchs_at_size_1(kind):
    layer, reference = build(kind), nn.Linear(8, 12)
    layer.draw_parameters(generator_of)
    nn.init.normal_(layer.bias)
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(3, 2, 8)
    assert torch.equal(layer(x), reference(x))


def test_embedding_is_torchs_at_size_1():
    layer, reference = build(VocabParallelEmbedding), nn.Embedding(12, 8)
    layer.draw_parameters(generator_of)
    reference.load_state_dict(layer.state_dict())
    tokens = torch.randint(12, (3, 2))
    assert torch.equal(layer(tokens), reference(tokens))


def test_values_are_those_of_the_full_fp32_weight_in_any_dtype():
    layer = build(ColumnParallelLinear).bfloat16()
    layer.draw_parameters(generator_of)
    full = torch.empty(12, 8).normal_(generator=generator_of("weight"))
    assert torch.equal(layer.weight, full.bfloat16())


def test_fused_matrices_keep_their_order():
    layer = ColumnParallelLinear(8, 12, bias=False, init_method=init_method, tensor_parallel=NOT_SPLIT, num_fused=2)
    layer.draw_parameters(generator_of)
    assert torch.equal(layer.weight, torch.empty(12, 8).normal_(generator=generator_of("weight")))


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding])
def test_larger_tensor_sizes_are_refused(kind):
    with pytest.raises(ConfigError, match="model_parallel_size is 2"):
        build(kind, TensorParallel(rank=0, size=2))


def test_cross_entropy_of_larger_tensor_sizes_is_refused():
    with pytest.raises(ConfigError, match="model_parallel_size is 2"):
        vocab_parallel_cross_entropy(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64), TensorParallel(0, 2))


def test_shard_is_the_ranks_equal_part():
    full = torch.arange(24).view(4, 6)
    assert torch.equal(TensorParallel(rank=1, size=2).shard(full, dim=0), full[2:])
    assert torch.equal(TensorParallel(rank=2, size=3).shard(full, dim=1), full[:, 4:])
