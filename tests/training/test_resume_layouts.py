"""A run that stops and goes on with other parallel sizes, against one that never stopped."""

import pytest

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
