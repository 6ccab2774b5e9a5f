"""Checkpoints from before tensors could be in slices still load, into any layout."""

import pytest

from megatron.checkpointing import LoadOptions, RunState, load_checkpoint
from megatron.errors import CheckpointError
from tests.checkpointing.grid_runs import Layout, load_rank, ranks
from tests.checkpointing.version_1 import write_checkpoint


@pytest.fixture
def written(tmp_path):
    held = ranks(Layout(tied=True))[0]
    return write_checkpoint(tmp_path, 4, held.weights, held.state, {"padded_vocab_size": 12})


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, tp=2, dp=2, zero=True)], ids=str)
def test_loads_into_any_layout(written, layout):
    for wanted in ranks(Layout(layout.pp, layout.tp, layout.dp, layout.zero, tied=True)):
        loaded, target = load_rank(written.parent, wanted, model={"padded_vocab_size": 12, "vocab_size": 11})
        assert target.same_as(wanted)
        assert loaded.run_state == RunState(4, 32, 4, 0, {"value": 512.0})
        assert loaded.random_state is not None


def test_damage_is_found(written):
    target = ranks(Layout(tied=True))[0].blank()
    path = written / "layer_001.safetensors"
    whole = path.read_bytes()
    for position in (0, 20, len(whole) - 1):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointError, match="layer_001"):
            load_checkpoint(written.parent, weights=target.weights, options=LoadOptions(no_load_rng=True))
    assert not any(tensor.any() for tensor in target.weights.values())
