"""Contract lines 22 to 26: scaling, wire dtype, loss scale, overflow, clipping, the NaN check."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.data_parallel.exposure import summarise
from megatron.errors import DivergenceError
from megatron.optimizer.loss_scale import ConstantLossScale, DynamicLossScale
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import Options, ToyModel, Trainer, assert_same_bits, loss_of, tokens_of, train

pytestmark = pytest.mark.distributed

SCALINGS = {
    "prescale": ReductionArithmetic(prescale=True),
    "postscale": ReductionArithmetic(prescale=False),
    "predivide": ReductionArithmetic(prescale=False, predivide_factor=2.0),
    "backend": ReductionArithmetic(average_in_collective=True),
}


def _gradients(rank, options):
    trainer = Trainer(options)
    trainer.backward(1)
    trainer.reducer.finish()
    times = summarise(trainer.reducer.collectives)
    return {name: gradient.clone() for name, gradient in trainer.reducer.gradients().items()}, times.bytes_sent


def _every_scaling(rank):
    return {
        name: [_gradients(rank, Options(arithmetic=arithmetic, overlap=overlap))[0] for overlap in (True, False)]
        for name, arithmetic in SCALINGS.items()
    }


def test_contract_22_scaling_only_orders_the_division_and_is_the_same_on_and_off():
    results = run_ranks(3, _every_scaling)
    for rank in results:
        for on, off in rank.values():
            assert_same_bits(on, off)
            for name, gradient in on.items():
                torch.testing.assert_close(gradient, rank["prescale"][0][name], rtol=1e-5, atol=1e-8)


def _average_alone(rank):
    return _gradients(rank, Options(arithmetic=SCALINGS["backend"], dtype=torch.bfloat16))[0]


def test_contract_22_a_group_of_one_is_never_asked_to_average():
    gradients = run_ranks(1, _average_alone)[0]
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def _wire_dtypes(rank):
    by_wire = {}
    for wire in (torch.float32, torch.bfloat16):
        options = Options(arithmetic=ReductionArithmetic(wire_dtype=wire), accumulation=4, dtype=torch.bfloat16)
        by_wire[wire] = _gradients(rank, options)
    sums = {}
    model = ToyModel()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for micro_batch in range(4):
        model.zero_grad()
        (loss_of(model, tokens_of(1, micro_batch, rank)) / 4).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0.0) + parameter.grad.float() / 2
    for name in sums:
        dist.all_reduce(sums[name])
    return by_wire, sums


def test_contract_23_micro_batches_accumulate_in_fp32_whatever_travels():
    for by_wire, expected in run_ranks(2, _wire_dtypes):
        exact, bytes_fp32 = by_wire[torch.float32]
        rounded, bytes_bf16 = by_wire[torch.bfloat16]
        assert bytes_fp32 == 2 * bytes_bf16
        for name, gradient in expected.items():
            torch.testing.assert_close(exact[name], gradient, rtol=1e-6, atol=1e-9)
            # Each rank's sum is rounded to bf16 once, the result of two ranks once more: 3 x 2**-9 of the largest term.
            bound = 3 * 2.0**-9 * float(gradient.abs().sum())
            torch.testing.assert_close(rounded[name], gradient, rtol=0.0, atol=bound)


def _scales(rank):
    options = Options(dtype=torch.float16, max_norm=0.3, optimizer=torch.optim.SGD, learning_rate=0.1)
    return [train(rank, options, 3, ConstantLossScale(scale)) for scale in (1.0, 1024.0)]


def test_contract_24_an_update_does_not_depend_on_the_loss_scale():
    for (weights_1, rows_1), (weights_1024, rows_1024) in run_ranks(2, _scales):
        for name in weights_1:
            # Without a scale the smallest fp16 gradients are subnormal; SGD passes their error on in proportion.
            torch.testing.assert_close(weights_1[name], weights_1024[name], rtol=1e-2, atol=2e-3)
        for row, row_1024 in zip(rows_1, rows_1024, strict=True):
            assert row[1] == pytest.approx(row_1024[1], rel=1e-3)


def _overflow_on_one_rank(rank):
    results = []
    for overlap in (True, False):
        scale = DynamicLossScale(2.0**10, window=2, hysteresis=1, minimum=1.0)
        trainer = Trainer(Options(dtype=torch.float16, overlap=overlap), loss_scale=scale)
        rows, before = [], None
        for step in range(1, 6):
            handle = None
            if step == 3:
                before = trainer.weights()
                if rank == 1:
                    handle = trainer.model.norm.weight.register_hook(lambda grad: grad * float("inf"))
            _, outcome = trainer.step(step)
            if step == 3:
                assert_same_bits(before, trainer.weights())
            if handle is not None:
                handle.remove()
            progress = trainer.optimizer.progress
            rows.append((float(outcome.skipped), outcome.loss_scale, outcome.learning_rate, progress.num_updates))
        results.append((trainer.weights(), rows))
    return results


def test_contract_24_an_overflow_on_one_rank_skips_once_on_every_rank():
    results = run_ranks(2, _overflow_on_one_rank)
    (on, rows), (off, rows_off) = results[0]
    assert rows == rows_off == results[1][0][1]
    assert_same_bits(on, off)
    assert_same_bits(on, results[1][0][0])
    assert [row[0] for row in rows] == [0, 0, 1, 0, 0]
    # Two clean steps double the scale, the overflow halves it, two more double it; the schedule did not advance.
    assert [row[1] for row in rows] == [2.0**10, 2.0**10, 2.0**11, 2.0**10, 2.0**10]
    assert [row[3] for row in rows] == [1, 2, 2, 3, 4]
    assert rows[2][2] == rows[3][2]


def _clip(rank):
    trainer = Trainer(Options(max_norm=0.05, optimizer=torch.optim.SGD, learning_rate=1.0))
    before = trainer.weights()
    _, outcome = trainer.step(1)
    moved = {name: before[name] - weight for name, weight in trainer.weights().items()}

    ddp = DistributedDataParallel(ToyModel(), find_unused_parameters=True)
    loss_of(ddp, tokens_of(1, 0, rank)).backward()
    norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
    expected = {name: p.grad for name, p in ddp.module.named_parameters() if p.grad is not None}
    return moved, float(outcome.grad_norm), outcome.learning_rate, expected, float(norm)


def test_contract_25_clipping_by_the_global_norm_equals_torch_on_ddp():
    for moved, norm, rate, expected, expected_norm in run_ranks(2, _clip):
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(moved[name] / rate, gradient, rtol=1e-3, atol=1e-6)


def _nan(rank):
    trainer = Trainer(Options(check_for_nan=True))
    if rank == 1:
        trainer.model.norm.bias.register_hook(lambda grad: grad * float("nan"))
    try:
        trainer.step(1)
    except DivergenceError as error:
        trainer.reducer.abort()
        return str(error)
    return "no error"


def test_contract_26_a_nan_is_named_with_rank_bucket_and_parameter_before_it_spreads():
    on_0, on_1 = run_ranks(2, _nan)
    assert on_0 == "no error"
    assert "rank 1" in on_1 and "norm.bias" in on_1 and "bucket" in on_1 and "norm.weight" not in on_1
