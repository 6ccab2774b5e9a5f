"""Parts that do not make a whole, or say different things."""

from dataclasses import replace

import pytest
import torch

from megatron.checkpointing import load_checkpoint, open_checkpoint
from megatron.checkpointing.manifest import Manifest
from megatron.errors import CheckpointError
from tests.checkpointing.grid_runs import EMBEDDING, Layout, load_rank, ranks, save_grid

SHARDED = Layout(dp=2, zero=True)
NORM = "layers.1.input_layernorm.weight"


def with_run(rank, name, run, state=None):
    """The rank as if it held `run` of a parameter."""
    state = state or {"exp_avg": torch.zeros(len(run)), "exp_avg_sq": torch.zeros(len(run))}
    state = {"master": torch.zeros(len(run)), "step": torch.tensor(7.0)} | state
    shards = dict(rank.holding.shards) | {name: run}
    return replace(rank, holding=replace(rank.holding, shards=shards), state=dict(rank.state) | {name: state})


def test_a_run_that_no_rank_holds_is_not_published(tmp_path):
    held = ranks(SHARDED)
    save_grid(tmp_path, held)
    (split,) = held[0].holding.shards.keys() & held[1].holding.shards.keys()
    length = len(held[0].holding.shards[split])
    held[0] = with_run(held[0], split, range(length - 1))
    with pytest.raises(
        CheckpointError, match=rf"no rank wrote optimizer: {split} \(elements {length - 1} to {length}\)"
    ):
        save_grid(tmp_path, held)
    assert open_checkpoint(tmp_path / "global_step5").manifest.pieces("optimizer")[split]


def test_a_run_that_no_file_holds_is_refused(tmp_path):
    directory = save_grid(tmp_path, ranks(Layout(tp=2, dp=2, zero=True)))
    manifest = Manifest.read(directory)
    name = EMBEDDING
    entry = next(entry for entry in manifest.files if "tensor_01" in entry.name and name in entry.pieces)
    kept = {key: piece for key, piece in entry.pieces.items() if key != name}
    files = tuple(replace(entry, pieces=kept) if entry == other else other for other in manifest.files)
    (directory / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())
    wanted = ranks(Layout())[0]
    with pytest.raises(CheckpointError, match=rf"no file holds .*{name} \(elements 0 to \d+ of slice 1\)"):
        load_rank(tmp_path, wanted)


@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_what_two_ranks_hold_must_be_equal(tmp_path, key):
    held = ranks(SHARDED)
    (holder,) = [index for index, rank in enumerate(held) if NORM in rank.holding.shards]
    same = with_run(held[1 - holder], NORM, range(2, 5), {k: cut(t) for k, t in held[holder].state[NORM].items()})
    held[1 - holder] = same
    save_grid(tmp_path / "same", held)
    for wanted in ranks(Layout(tp=2)):
        assert load_rank(tmp_path / "same", wanted)[1].same_as(wanted)

    held[1 - holder] = with_run(same, NORM, range(2, 5), same.state[NORM] | {key: same.state[NORM][key] + 1e-3})
    save_grid(tmp_path / "other", held)
    target = ranks(Layout())[0].blank()
    with pytest.raises(CheckpointError, match=rf"contradicts itself: elements 2 to 5 of {NORM}/{key} differ"):
        load_checkpoint(tmp_path / "other", weights=target.weights, optimizer_state=target.state)
    assert not any(tensor.any() for tensor in target.weights.values())


def cut(tensor):
    return tensor if tensor.dim() == 0 else tensor[2:5]


def test_runs_that_overlap_in_part(tmp_path):
    held = ranks(SHARDED)
    whole = next(rank.state[NORM] for rank in held if NORM in rank.state)
    for index, run in enumerate([range(4), range(2, 6)]):
        state = {key: tensor if tensor.dim() == 0 else tensor[run.start : run.stop] for key, tensor in whole.items()}
        held[index] = with_run(held[index], NORM, run, state)
    save_grid(tmp_path, held)
    for wanted in ranks(Layout(tp=2)):
        assert load_rank(tmp_path, wanted)[1].same_as(wanted)


def test_ranks_must_mean_the_same_parameter(tmp_path):
    held = ranks(Layout(pp=2, tied=True, zero=True))
    held[1].state[EMBEDDING]["momentum"] = held[1].state[EMBEDDING].pop("exp_avg")
    with pytest.raises(CheckpointError, match=f"ranks disagree about {EMBEDDING}.*momentum"):
        save_grid(tmp_path, held)


def test_state_of_another_size_than_its_run(tmp_path):
    held = ranks(SHARDED)
    name = next(iter(held[0].holding.shards))
    held[0].state[name]["exp_avg"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=rf"{name}/exp_avg has 1 elements instead of"):
        save_grid(tmp_path, held[:1])


def test_elements_of_a_transposed_weight_cannot_be_counted(tmp_path):
    held = ranks(SHARDED)
    held[0].weights[EMBEDDING] = torch.zeros(6, 12).t()
    with pytest.raises(CheckpointError, match=f"elements of {EMBEDDING} cannot be counted"):
        save_grid(tmp_path, held[:1])


def test_another_optimizer_is_refused_by_name_with_zero_too(tmp_path):
    save_grid(tmp_path, ranks(SHARDED))
    wanted = ranks(SHARDED)[0]
    name = next(iter(wanted.state))
    wanted.state[name]["momentum"] = wanted.state[name].pop("exp_avg")
    with pytest.raises(CheckpointError) as refusal:
        load_rank(tmp_path, wanted)
    assert f"missing in the checkpoint: {name}/momentum" in str(refusal.value)
    assert f"not in this model: {name}/exp_avg" in str(refusal.value)
