"""Random streams of tensor ranks, one process playing all ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron.checkpointing import RandomState
from megatron.model.dropout import residual_dropout
from megatron.mpu.random_state import rank_random_stream
from megatron.mpu.tensor_parallel import NOT_SPLIT, TensorParallel

CPU = torch.device("cpu")


def draws(tensor_parallel, seed=0):
    """Numbers from the default stream, from the rank's, from the rank's again, from the default one."""
    torch.manual_seed(seed)
    numbers = [torch.rand(8)]
    for _ in range(2):
        with rank_random_stream(tensor_parallel, CPU):
            numbers.append(torch.rand(8))
    return [*numbers, torch.rand(8)]


def test_ranks_draw_differently_inside_and_alike_outside():
    first, second = draws(TensorParallel(0, 2)), draws(TensorParallel(1, 2))
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, False, True]
    everything = [*first, *second[1:3]]
    assert len({tuple(numbers.tolist()) for numbers in everything}) == len(everything)


def test_one_rank_draws_from_the_default_stream():
    torch.manual_seed(0)
    expected = [torch.rand(8) for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(draws(NOT_SPLIT), expected, strict=True))


def test_default_stream_is_back_after_an_error():
    def draw_after(draw_inside):
        torch.manual_seed(0)
        with pytest.raises(ZeroDivisionError), rank_random_stream(TensorParallel(1, 2), CPU):
            torch.rand(draw_inside)
            raise ZeroDivisionError
        return torch.rand(8)

    assert torch.equal(draw_after(1), draw_after(100))


def test_what_is_saved_of_the_default_stream_continues_the_ranks():
    tensor_parallel = TensorParallel(1, 2)
    draws(tensor_parallel)
    saved = RandomState.from_tensors(RandomState.capture().to_tensors())

    def draw():
        with rank_random_stream(tensor_parallel, CPU):
            return torch.rand(8)

    expected = draw()
    assert not torch.equal(draw(), expected)
    saved.restore()
    assert torch.equal(draw(), expected)


def test_recomputation_draws_the_same():
    def drop(x):
        with rank_random_stream(TensorParallel(1, 2), CPU):
            return F.dropout(x) * F.dropout(x)

    x = torch.ones(1000, requires_grad=True)
    torch.manual_seed(0)
    y = checkpoint(drop, x, use_reentrant=False)
    torch.rand(8)  # whatever happens between forward and backward
    y.sum().backward()
    assert 0 < (y > 0).sum() < 1000
    assert torch.equal(x.grad > 0, y > 0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_residual_dropout_differs_between_ranks_only_where_they_hold_different_parts(sequence_parallel):
    def dropped(rank):
        torch.manual_seed(0)
        tensor_parallel = TensorParallel(rank, 2, sequence_parallel=sequence_parallel)
        return residual_dropout(torch.ones(2, 8, 8), 0.5, training=True, tensor_parallel=tensor_parallel)

    assert torch.equal(dropped(0), dropped(1)) is not sequence_parallel
    assert 0.3 < (dropped(1) == 0).float().mean() < 0.7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerators_ranks_draw_differently_inside_and_alike_outside():
    device = torch.accelerator.current_accelerator()

    def draws_there(rank):
        torch.manual_seed(0)
        with rank_random_stream(TensorParallel(rank, 2), device):
            inside = torch.rand(8, device=device)
        return inside, torch.rand(8, device=device)

    (inside, outside), (other_inside, other_outside) = draws_there(0), draws_there(1)
    assert not torch.equal(inside, other_inside)
    assert torch.equal(outside, other_outside)
