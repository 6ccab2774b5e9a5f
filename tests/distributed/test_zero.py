"""ZeRO 1 and 2: gradients scattered, the update sharded, parameters gathered; and the same training as without."""

import pytest
import torch

from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.data_parallel.collective import shards_bytes_sent
from megatron.data_parallel.exposure import summarise
from megatron.optimizer.loss_scale import DynamicLossScale
from tests.distributed.ranks import run_ranks
from tests.distributed.test_life_cycle import fails_in_backward
from tests.distributed.toy import Options, ToyModel, Trainer, assert_same_bits, loss_of, tokens_of, train

pytestmark = pytest.mark.distributed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _scale(dtype):
    return DynamicLossScale(2.0**8, window=2, hysteresis=1, minimum=1.0) if dtype is torch.float16 else None


def _every_stage(rank, accumulation):
    def run(stage, dtype, overlap, optimizer):
        options = Options(
            zero_stage=stage,
            overlap=overlap,
            overlap_param_gather=overlap,
            dtype=dtype,
            accumulation=accumulation,
            optimizer=optimizer,
        )
        return train(rank, options, 8, _scale(dtype))

    return {
        (stage, dtype): (
            run(stage, dtype, True, torch.optim.AdamW),
            run(stage, dtype, False, torch.optim.AdamW),
            run(stage, dtype, True, torch.optim.SGD),
        )
        for stage in (0, 1, 2)
        for dtype in DTYPES
    }


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (3, 3)])
def test_contract_01_04_and_25_every_zero_stage_trains_as_stage_0_and_on_equals_off(world_size, accumulation):
    ranks = run_ranks(world_size, _every_stage, accumulation)
    for results in ranks:
        for (stage, dtype), (on, off, by_sgd) in results.items():
            assert_same_bits(on[0], off[0])
            assert on[1] == off[1]
            assert_same_bits(on[0], ranks[0][stage, dtype][0][0])
            assert [row[1:] for row in on[1]] == [row[1:] for row in ranks[0][stage, dtype][0][1]]
            # SGD passes rounding on in proportion; Adam turns that of a gradient near zero into a full update.
            weights, rows = results[0, dtype][2]
            for row, expected in zip(by_sgd[1], rows, strict=True):
                assert row[:2] == pytest.approx(expected[:2], rel=ROUNDING[dtype])
                assert row[2:] == expected[2:]
            for name, weight in by_sgd[0].items():
                torch.testing.assert_close(weight, weights[name], rtol=ROUNDING[dtype], atol=1e-6, msg=name)


def _bytes(rank, stage, dtype):
    trainer = Trainer(Options(zero_stage=stage, dtype=dtype, accumulation=3))
    counts = []
    trainer.backward(1, after_backward=lambda _: counts.append(len(trainer.reducer.collectives)))
    trainer.reducer.finish()
    sent = summarise(trainer.reducer.collectives).bytes_sent
    trainer.optimizer.step()
    return (
        counts,
        sent,
        summarise(trainer.gather.collectives).bytes_sent,
        [b.num_elements for b in trainer.plan.buckets],
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_contract_05_stage_1_sends_at_the_boundary_and_stage_2_in_every_micro_batch(stage):
    for dtype in (torch.float32, torch.bfloat16):
        for counts, grad_bytes, param_bytes, buckets in run_ranks(3, _bytes, stage, dtype):
            num_elements = sum(buckets)
            scatters = {1: 1, 2: 3}[stage]
            assert grad_bytes == scatters * shards_bytes_sent(4 * num_elements, 3)
            assert param_bytes == shards_bytes_sent(dtype.itemsize * num_elements, 3)
            # ToyModel's unused parameter keeps its bucket, and those after it, for the end of the backward.
            if stage == 1:
                assert counts[:2] == [0, 0] and counts[2] >= 1
            else:
                assert counts[:2] == [len(buckets), 2 * len(buckets)] and counts[2] > counts[1]


def _shares(rank, stage):
    trainer = Trainer(Options(zero_stage=stage, dtype=torch.bfloat16))
    trainer.step(1)
    shards = trainer.optimizer.shards
    lengths = {
        name: {key: value.shape for key, value in s.items()} for name, s in trainer.optimizer.named_state().items()
    }
    kept = [bucket._buffer is not None for bucket in trainer.reducer._buckets]
    return shards, lengths, kept, {name: parameter.numel() for name, parameter in trainer.parameters.items()}


@pytest.mark.parametrize("stage", [1, 2])
def test_each_rank_keeps_a_third_of_the_optimizer_state_and_stage_2_keeps_no_whole_gradient(stage):
    ranks = run_ranks(3, _shares, stage)
    _, _, kept, sizes = ranks[0]
    assert all(kept) if stage == 1 else not any(kept)
    for name, size in sizes.items():
        runs = [shards[name] for shards, *_ in ranks if name in shards]
        assert sorted(element for run in runs for element in run) == list(range(size)), name
    totals = [sum(map(len, shards.values())) for shards, *_ in ranks]
    assert max(totals) - min(totals) <= 0.25 * sum(totals) / 3
    for shards, lengths, *_ in ranks:
        assert lengths.keys() == shards.keys()
        for name, tensors in lengths.items():
            assert {"exp_avg", "exp_avg_sq", "master"} <= tensors.keys()
            assert all(shape in ((), (len(shards[name]),)) for shape in tensors.values())


def _fails_under_zero(rank, stage):
    return fails_in_backward(rank, (0,), Options(zero_stage=stage, accumulation=2))


@pytest.mark.parametrize("stage", [1, 2])
def test_contract_30_when_one_rank_fails_in_a_scattered_step_no_other_takes_it(stage):
    (error_0, _, weights_0, quiet), (error_1, skipped_1, weights_1, _) = run_ranks(2, _fails_under_zero, stage)
    assert error_0 == "original text" and error_1 is None and skipped_1 == 1.0
    assert_same_bits(weights_0, weights_1)
    assert all(torch.isfinite(weight).all() for weight in weights_0.values()) and quiet.keys() == weights_0.keys()


def _narrow_wire(rank, stage):
    trainer = Trainer(Options(zero_stage=stage, arithmetic=ReductionArithmetic(wire_dtype=torch.bfloat16)))
    trainer.backward(1)
    trainer.reducer.finish()
    runs = trainer.optimizer.shards or {}
    num_elements = sum(bucket.num_elements for bucket in trainer.plan.buckets)
    return trainer.reducer.gradients(), runs, summarise(trainer.reducer.collectives).bytes_sent, num_elements


def _sum_of_rounded(world_size):
    """What is left when each rank's share is rounded to bf16 once and the sum is made in fp32."""
    model = ToyModel()
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for rank in range(world_size):
        model.zero_grad()
        loss_of(model, tokens_of(1, 0, rank)).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] += (parameter.grad / world_size).bfloat16().float()
    return sums


@pytest.mark.parametrize("stage", [0, 1])
def test_contract_23_the_sum_over_ranks_is_fp32_whatever_travels(stage):
    expected = _sum_of_rounded(4)
    for gradients, runs, bytes_sent, num_elements in run_ranks(4, _narrow_wire, stage):
        assert bytes_sent == (2 if stage == 0 else 1) * shards_bytes_sent(2 * num_elements, 4)
        for name, gradient in gradients.items():
            wanted = expected[name].as_strided((gradient.numel(),), (1,)) if stage == 0 else None
            if wanted is None:
                run = runs[name]
                wanted = expected[name].as_strided((expected[name].numel(),), (1,))[run.start : run.stop]
            else:
                # An all-reduce sends the sum as well, in the same dtype.
                wanted = wanted.bfloat16().float()
                gradient = gradient.as_strided((gradient.numel(),), (1,))
            torch.testing.assert_close(gradient, wanted, rtol=2.0**-7 if stage == 0 else 1e-5, atol=1e-9)
