"""The split layers at tensor size 1, and sizes that they refuse."""

import pytest
import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.mpu import column_linear as column_linear_module
from megatron.mpu import mappings
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
def test_sizes_that_do_not_divide_are_refused_with_their_numbers(kind):
    with pytest.raises(ConfigError, match=r"(12|8) is not a multiple of model_parallel_size 5"):
        build(kind, TensorParallel(rank=0, size=5))


def test_fused_matrices_are_divided_each_by_itself():
    # 12 rows are three times 4, but two fused matrices of 6 rows cannot give each of 4 ranks whole rows of both.
    with pytest.raises(ConfigError, match="6 is not a multiple of model_parallel_size 4"):
        ColumnParallelLinear(
            8, 12, bias=False, init_method=init_method, tensor_parallel=TensorParallel(0, 4), num_fused=2
        )


@pytest.mark.parametrize("name", ["_ColumnLinear", "_AllReduce", "_ReduceScatterSequence", "_ScatterSequence"])
def test_size_1_costs_nothing(name, monkeypatch):
    # Sequence parallelism of one tensor rank is none.
    alone = TensorParallel(sequence_parallel=True)
    for module in (column_linear_module, mappings):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, None)
    x = torch.randn(3, 2, 8)
    column, row = (
        build(ColumnParallelLinear, alone),
        RowParallelLinear(12, 8, bias=True, init_method=init_method, tensor_parallel=alone),
    )
    assert row(column(x)).shape == x.shape
    for function in (mappings.sum_over_ranks, mappings.sum_into_residual, mappings.scatter_sequence):
        assert function(x, alone) is x
    assert mappings.gather_logits(x, alone) is x


def test_shard_is_the_ranks_equal_part():
    full = torch.arange(24).view(4, 6)
    assert torch.equal(TensorParallel(rank=1, size=2).shard(full, dim=0), full[2:])
    assert torch.equal(TensorParallel(rank=2, size=3).shard(full, dim=1), full[:, 4:])
