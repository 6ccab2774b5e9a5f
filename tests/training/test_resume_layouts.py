"""A run that stops and goes on with other parallel sizes, against one that never stopped."""

from dataclasses import replace

import pytest

from tests.distributed.ranks import run_ranks
from tests.training.in_process import assert_close, stages, train_runs
from tests.training.runs import TinyRun, write_corpus

pytestmark = pytest.mark.distributed

# Tied, so that the embedding's weight and state cross stages; without dropout, whose masks depend on the layout.
MODEL = {"no_weight_tying": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}
DATA_RANKS = {"zero_optimization": {"stage": 1}}
STAGES = {"pipe_parallel_size": 2, "gradient_accumulation_steps": 2}
TENSOR_RANKS = {"model_parallel_size": 2, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_run_goes_on_with_other_data_ranks_stages_and_tensor_ranks(prefix, tmp_path, precision):
    straight = TinyRun(prefix, tmp_path / "straight", {**MODEL, "precision": precision})
    straight.train()
    checkpoints = {"save": str(tmp_path / "checkpoints"), "load": str(tmp_path / "checkpoints")}
    for stop, layout in [(2, DATA_RANKS), (4, STAGES), (None, TENSOR_RANKS)]:
        settings = {**MODEL, "precision": precision, **checkpoints, **layout, "exit_interval": stop}
        run = TinyRun(prefix, tmp_path / "changing", settings)
        said = run.train()
    assert "going on after iteration 4" in said
    tolerance = 1e-5 if precision == "fp32" else 2e-3
    pairs = list(zip(run.rows(without=()), straight.rows(without=()), strict=True))
    for changed, unchanged in pairs:
        assert changed["iteration"] == unchanged["iteration"]
        assert changed["lm_loss"] == pytest.approx(unchanged["lm_loss"], rel=tolerance)
        assert changed.get("learning_rate") == unchanged.get("learning_rate")


def _stop_and_go_on(rank, folder, first, then):
    """Stop after 3 steps with `first`, and go on to the end with each of `then`, from there."""
    checkpoints = f"{folder}/first"
    train_runs(rank, [{**first, "exit_interval": 3, "save": checkpoints}])
    return train_runs(rank, [{**settings, "load": checkpoints} for settings in then])


def _straight_and_changing(rank, folder, straight, pairs):
    """An uninterrupted run, and runs that stop with the first and go on with the others of each pair."""
    (unchanged,) = train_runs(rank, [straight])
    return unchanged, [_stop_and_go_on(rank, f"{folder}/{i}", *pair) for i, pair in enumerate(pairs)]


def test_a_run_goes_on_with_any_other_number_of_stages_and_back(prefix, tmp_path):
    """Tied, so that weight and state of the embedding move between stages; with data ranks and ZeRO 1 changing too."""
    data = {"data_path": str(prefix)}
    zero_1 = {"zero_optimization": {"stage": 1}}
    pairs = [
        (stages(0, **data), [stages(pipe, **data) for pipe in (1, 2, 4)]),
        (stages(1, **data), [stages(0, **data)]),
        (stages(2, **data, **zero_1), [stages(0, **data), stages(4, **data, **zero_1)]),
        (stages(4, **data), [stages(0, **data, **zero_1)]),
        (stages(2, **data, **zero_1), [stages(0, **data, model_parallel_size=2, gradient_accumulation_steps=4)]),
    ]
    for unchanged, changing in run_ranks(4, _straight_and_changing, str(tmp_path), stages(0, **data), pairs):
        for resumed in (resumed for runs in changing for resumed in runs):
            unchanged_rest = replace(unchanged, rows=unchanged.rows[3:])
            assert_close(resumed, unchanged_rest)
        # Between 0 and 1 nothing is even rounded in another way.
        assert changing[0][0] == changing[1][0] == unchanged_rest


@pytest.mark.parametrize("precision", ["fp32", "bfloat16", "fp16"])
def test_0_goes_on_as_1_bit_for_bit_with_dropout(prefix, tmp_path, precision):
    both = [{"data_path": str(prefix), "precision": precision, "pipe_parallel_size": pipe} for pipe in (0, 1)]
    pairs = [(both[0], both[1:]), (both[1], both[:1])]
    for unchanged, changing in run_ranks(2, _straight_and_changing, str(tmp_path), both[0], pairs):
        for (resumed,) in changing:
            assert repr(resumed.rows) == repr(unchanged.rows[3:])
            assert resumed.evaluated == unchanged.evaluated
