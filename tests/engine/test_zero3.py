"""ZeRO 3 through DeepSpeed's engine: the numbers of ZeRO 0, skipped steps, checkpoints of either, nothing left over."""

import os
from pathlib import Path

import pytest
import torch

from megatron.errors import DivergenceError
from megatron.optimizer import progress
from megatron.training.state import TrainState
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import assert_same_bits
from tests.engine.zero3_runs import ZERO_3, SmallRun, column

pytestmark = pytest.mark.distributed

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}}}
FP32 = {
    "one micro-batch": {},
    "four micro-batches, tied, recomputed": {
        "gradient_accumulation_steps": 4,
        "no_weight_tying": False,
        "checkpoint_activations": True,
    },
    "SGD, overlap": {**SGD, "overlap_grad_reduce": True},
    "Lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}},
}
OFFLOADED = {
    "zero_optimization": {
        **ZERO_3["zero_optimization"],
        "sub_group_size": 3000,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
}
LOW = {
    "bf16": {"precision": "bfloat16", "gradient_accumulation_steps": 4},
    "fp16, a growing scale": {**SGD, "precision": "fp16", "initial_scale_power": 6, "loss_scale_window": 2},
    "fp16, a constant scale": {"precision": "fp16", "loss_scale": 64.0},
}


def _train(settings, num_steps=8):
    """Train, evaluate, let go; return rows, evaluation loss and whole weights."""
    run = SmallRun.build(**settings)
    rows = run.steps(1, num_steps)
    outcome = rows, run.evaluate(), run.weights()
    run.engine.close()
    return outcome


def _both(cases):
    return {name: (_train({**case, **ZERO_3}), _train(case)) for name, case in cases.items()}


def _masters_at_start():
    """Whether each fp32 master weight is the starting value itself, not what casting it to bf16 left of it."""
    three, zero = (SmallRun.build(precision="bfloat16", **stage).engine for stage in (ZERO_3, {}))
    mine, theirs = (engine.tensors_to_save(is_writer=True, with_optimizer=True) for engine in (three, zero))
    names = theirs.weights.keys()
    rounded = [name for name in names if not torch.equal(mine.optimizer_state[name]["master"], theirs.weights[name])]
    return rounded, [
        torch.equal(mine.optimizer_state[name]["master"], theirs.optimizer_state[name]["master"]) for name in names
    ]


def _overflow():
    settings = {"precision": "fp16", "initial_scale_power": 24}
    three, zero = (SmallRun.build(**settings, **stage) for stage in (ZERO_3, {}))
    before = three.weights()
    first = three.steps(1, 1)
    unmoved = [torch.equal(weight, before[name]) for name, weight in three.weights().items()]
    return first + three.steps(2, 12), zero.steps(1, 12), unmoved, three.engine.optimizer.progress.num_skipped


def _diverge():
    progress.MAX_SKIPPED_IN_A_ROW = 5  # in this process, which ends with the runs
    num_skipped = []
    for precision in ("fp16", "bfloat16"):
        run = SmallRun.build(precision=precision, initial_scale_power=1, hysteresis=1, **ZERO_3)
        run.engine.module.register_forward_hook(lambda module, inputs, loss: loss * float("nan"))
        with pytest.raises(DivergenceError, match="5 steps in a row"):
            run.steps(1, 10)
        num_skipped.append(run.engine.optimizer.progress.num_skipped)
    return num_skipped


def _left_over(folder):
    linear = torch.nn.functional.linear
    run = SmallRun.build(**ZERO_3)
    run.steps(1, 1)
    sizes = {parameter.numel() for parameter in run.engine.module.parameters()}
    replaced = torch.nn.functional.linear is not linear
    run.engine.close()
    compiled = [path.name for path in Path(folder).rglob("*")]
    return compiled, sizes, replaced, torch.nn.functional.linear is linear


def _runs(rank, folder):
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    return {
        "left over": _left_over(folder),
        "fp32": _both(FP32),
        "one stage": _train({**ZERO_3, "pipe_parallel_size": 1}),
        "offloaded": _train(OFFLOADED),
        "low": _both(LOW),
        "masters at start": _masters_at_start(),
        "overflow": _overflow(),
        "divergence": _diverge(),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each of two ranks saw, in all runs at once: ranks take longer to start than these runs take."""
    return run_ranks(2, _runs, str(tmp_path_factory.mktemp("extensions")))


def _assert_close(one, other, *, loss, norm, weights):
    """Compare two outcomes of `_train` to the given relative tolerances; weights to an absolute one."""
    (rows, evaluated, held), (expected_rows, expected_evaluated, expected_held) = one, other
    assert column(rows, "loss") == pytest.approx(column(expected_rows, "loss"), rel=loss)
    assert column(rows, "norm") == pytest.approx(column(expected_rows, "norm"), rel=norm)
    assert evaluated == pytest.approx(expected_evaluated, rel=loss)
    for name in ("rate", "scale", "skipped"):
        assert column(rows, name) == column(expected_rows, name)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    for name, weight in expected_held.items():
        torch.testing.assert_close(held[name], weight, rtol=0, atol=weights)


@pytest.mark.parametrize("case", FP32)
def test_fp32_equals_zero_0(runs, case):
    for outcomes in runs:
        zero_3, zero_0 = outcomes["fp32"][case]
        _assert_close(zero_3, zero_0, loss=1e-5, norm=1e-4, weights=1e-4)
        assert zero_3[0] == runs[0]["fp32"][case][0][0]


def test_offloading_in_several_sub_groups_changes_nothing(runs):
    for outcomes in runs:
        _assert_close(outcomes["offloaded"], outcomes["fp32"]["one micro-batch"][1], loss=1e-5, norm=1e-4, weights=1e-4)


@pytest.mark.parametrize("case", LOW)
def test_bf16_and_fp16_equal_zero_0_to_rounding(runs, case):
    for outcomes in runs:
        zero_3, zero_0 = outcomes["low"][case]
        if case == "bf16":
            _assert_close(zero_3, zero_0, loss=5e-4, norm=2e-2, weights=2e-2)
        else:
            _assert_close(zero_3, zero_0, loss=1e-4, norm=2e-3, weights=1e-2)
        assert {weight.dtype for weight in zero_3[2].values()} <= {torch.bfloat16, torch.float16}


def test_masters_start_with_what_the_cast_drops(runs):
    for outcomes in runs:
        rounded, equal = outcomes["masters at start"]
        assert rounded and all(equal)


def test_no_stage_and_one_have_the_same_bits(runs):
    for outcomes in runs:
        no_stage, one_stage = outcomes["fp32"]["one micro-batch"][0], outcomes["one stage"]
        assert one_stage[:2] == no_stage[:2]
        assert_same_bits(one_stage[2], no_stage[2])


def test_an_overflow_skips_the_step_and_moves_the_scale_as_with_zero_0(runs):
    for outcomes in runs:
        rows, expected, unmoved, num_skipped = outcomes["overflow"]
        for name in ("rate", "scale", "skipped"):
            assert column(rows, name) == column(expected, name)
        assert rows[0]["skipped"] == 1.0 and rows[0]["norm"] == float("inf") and rows[-1]["skipped"] == 0.0
        assert all(unmoved)
        assert num_skipped == sum(column(rows, "skipped")) >= 3


def test_weights_are_sharded_between_steps_no_op_is_compiled_and_torch_is_put_back(runs):
    for outcomes in runs:
        compiled, sizes, replaced, put_back = outcomes["left over"]
        assert compiled == []
        assert sizes == {0}
        assert replaced and put_back


def test_skipped_steps_in_a_row_end_the_run_and_the_smallest_scale_does_not(runs):
    for outcomes in runs:
        assert outcomes["divergence"] == [5, 5]


def _checkpoints(rank, folder):
    """From each stage: save after 3 steps and go on to 6; from its checkpoint, go on with either stage."""
    outcomes = {}
    for precision in ("fp32", "fp16"):
        settings = {"precision": precision, "initial_scale_power": 8, "loss_scale_window": 2}
        for source, stage in (("ZeRO 3", ZERO_3), ("ZeRO 0", {})):
            root = f"{folder}/{precision} {source}"
            run = SmallRun.build(**settings, **stage, save=root)
            run.steps(1, 3)
            run.checkpoints.save(TrainState(3, 12))
            straight = run.steps(4, 6), run.weights()
            outcomes[precision, source] = (
                straight,
                {
                    "ZeRO 3": _resumed(root, **settings, **ZERO_3),
                    "ZeRO 0": _resumed(root, **settings),
                },
            )
    return outcomes


def _resumed(root, **settings):
    run = SmallRun.build(**settings, load=root)
    state, _ = run.checkpoints.load()
    return run.steps(state.iteration + 1, 6), run.weights()


def test_a_checkpoint_of_zero_0_or_3_goes_on_with_either(tmp_path):
    for outcomes in run_ranks(2, _checkpoints, str(tmp_path)):
        for (precision, source), (straight, resumed) in outcomes.items():
            assert resumed[source][0] == straight[0]
            assert_same_bits(resumed[source][1], straight[1])
            tolerance = 1e-5 if precision == "fp32" else 1e-2
            for rows, _ in resumed.values():
                for name in ("loss", "norm"):
                    assert column(rows, name) == pytest.approx(column(straight[0], name), rel=tolerance)
                for name in ("rate", "scale"):
                    assert column(rows, name) == column(straight[0], name)
