"""The pieces of tensor parallelism over gloo ranks: collectives, layers, cross entropy, attention's dropout."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.mpu.collectives import start_all_reduce, start_gather, start_reduce_scatter
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.mappings import gather_logits, scatter_sequence
from tests.distributed.ranks import run_ranks
from tests.distributed.split_models import build, split
from tests.model.small import tokens

pytestmark = pytest.mark.distributed


def _values(rank, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def _collectives(rank):
    tensor_parallel = split(rank, sequence_parallel=True)
    found = {"sum": start_all_reduce(_values(rank, 2, 4), tensor_parallel).wait()}
    for dim in (0, 1, -1):
        gathering = start_gather(_values(rank, 2, 3, 5), tensor_parallel, dim=dim)
        scattering = start_reduce_scatter(_values(rank, 4, 8, 12), tensor_parallel, dim=dim)
        found[dim] = gathering.wait(), scattering.wait()
    # 256 + 1 is 256 in bf16: the four terms make 259, nearest bf16 260, only if they are summed in fp32.
    terms = torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    found["bf16"] = start_reduce_scatter(terms, tensor_parallel, dim=0).wait()
    with pytest.raises(ValueError, match="length of 6 cannot be divided over 4"):
        start_reduce_scatter(_values(rank, 6), tensor_parallel, dim=0)
    with pytest.raises(ValueError, match="length of 6 cannot be divided over 4"):
        scatter_sequence(_values(rank, 2, 6, 1), tensor_parallel)
    return found


def test_collectives_join_and_split_along_any_dim():
    for rank, found in enumerate(run_ranks(4, _collectives)):
        torch.testing.assert_close(found["sum"], sum(_values(other, 2, 4) for other in range(4)))
        for dim in (0, 1, -1):
            gathered, part = found[dim]
            assert torch.equal(gathered, torch.cat([_values(other, 2, 3, 5) for other in range(4)], dim=dim))
            summed = sum(_values(other, 4, 8, 12) for other in range(4))
            torch.testing.assert_close(part, summed.chunk(4, dim)[rank])
        assert found["bf16"].tolist() == [260.0]


def _double(kind, bias, tensor_parallel):
    layer = kind(
        4, 4, bias=bias, init_method=lambda w, g: w.normal_(generator=g), tensor_parallel=tensor_parallel
    ).double()
    layer.draw_parameters(lambda name: torch.Generator().manual_seed(1))
    return layer


def _gradcheck(rank):
    tensor_parallel = split(rank, sequence_parallel=False)
    column, row = (_double(kind, True, tensor_parallel) for kind in (ColumnParallelLinear, RowParallelLinear))
    x = _values(0, 1, 2, 4).double().requires_grad_()
    # All ranks move the same element of the same input at the same time: a function of x like any other.
    assert torch.autograd.gradcheck(lambda x: row(torch.tanh(column(x))), x)
    frozen = x.detach()
    row(column(frozen)).sum().backward()
    return column.weight.grad


def test_gradient_of_column_then_row_is_that_of_finite_differences():
    assert all(gradient.abs().sum() > 0 for gradient in run_ranks(2, _gradcheck))


def _logits(dtype):
    logits_BSV = 30 * _values(0, 2, 5, 12)
    logits_BSV[0, 0] = 1000.0
    labels_BS = torch.arange(10).view(2, 5) + 1
    return logits_BSV.to(dtype), labels_BS


def _cross_entropy(rank):
    tensor_parallel = split(rank, sequence_parallel=False)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        logits_BSV, labels_BS = _logits(dtype)
        local_BSV = tensor_parallel.shard(logits_BSV, dim=-1).clone().requires_grad_()
        losses_BS = vocab_parallel_cross_entropy(local_BSV, labels_BS, tensor_parallel)
        (losses_BS * torch.arange(10).view(2, 5)).sum().backward()
        assert torch.equal(gather_logits(local_BSV, tensor_parallel), logits_BSV)
        found[dtype] = losses_BS.detach(), local_BSV.grad
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_is_torchs(dtype):
    for rank, found in enumerate(run_ranks(3, _cross_entropy)):
        logits_BSV, labels_BS = _logits(dtype)
        logits_BSV.requires_grad_()
        expected_BS = F.cross_entropy(logits_BSV.float().transpose(1, 2), labels_BS, reduction="none")
        (expected_BS * torch.arange(10).view(2, 5)).sum().backward()
        losses_BS, gradient_BSV = found[dtype]
        torch.testing.assert_close(losses_BS, expected_BS, rtol=1e-6, atol=1e-6)
        assert losses_BS.dtype is torch.float32 and gradient_BSV.dtype is dtype
        torch.testing.assert_close(gradient_BSV, logits_BSV.grad.chunk(3, -1)[rank])


def _attended_heads(rank):
    """What two ranks' heads see, given the same weights, with and without dropout."""
    tensor_parallel = split(rank, sequence_parallel=False)
    seen = []
    for dropout in (0.0, 0.5):
        decoder = build({"attention_dropout": dropout, "hidden_dropout": 0.5}, tensor_parallel)
        weight = decoder.get_parameter("layers.1.attention.query_key_value.weight")
        dist.broadcast(weight.detach(), 0)
        dist.broadcast(decoder.get_parameter("layers.1.attention.query_key_value.bias").detach(), 0)
        decoder.layers["1"].attention.dense.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        decoder.layers["3"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        torch.manual_seed(0)
        decoder(tokens())
    return seen


def test_attention_dropout_differs_between_ranks_and_the_residual_stays_the_same():
    first, second = run_ranks(2, _attended_heads)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, True, False, True]
