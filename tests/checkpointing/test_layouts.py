"""What one grid of ranks saved, any other reads: every tensor of every rank bit for bit."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.checkpointing import GridPosition, Holding, RunState, load_checkpoint, open_checkpoint
from megatron.checkpointing.layout import ParameterLayout
from tests.checkpointing.grid_runs import (
    EMBEDDING,
    HEAD,
    Layout,
    full,
    load_rank,
    parameters,
    rank_of,
    ranks,
    save_grid,
)

UNTIED = [
    Layout(),
    Layout(zero=True),
    Layout(dp=3, zero=True),
    Layout(pp=2, tp=2),
    Layout(tp=2, dp=2, zero=True),
    Layout(tp=4, dp=2),
    Layout(pp=4, tp=2, dp=2, zero=True),
    # The first data rank has nearly nothing, the last nothing.
    Layout(dp=3, zero=True, cuts=(0.01, 1.0)),
]
TIED = [
    Layout(tied=True),
    Layout(tied=True, dp=2, zero=True),
    Layout(tied=True, pp=2),
    Layout(tied=True, pp=2, tp=2, dp=2, zero=True),
    Layout(tied=True, pp=4, zero=True),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The root of a checkpoint in some layout, written once."""
    roots = {}

    def root_of(layout):
        if layout not in roots:
            roots[layout] = tmp_path_factory.mktemp("layout")
            save_grid(roots[layout], ranks(layout))
        return roots[layout]

    return root_of


@pytest.mark.parametrize("wanted", UNTIED, ids=str)
@pytest.mark.parametrize("written", UNTIED, ids=str)
def test_any_layout_from_any_other(saved, written, wanted):
    assert_loads_as(saved(written), wanted)


@pytest.mark.parametrize("wanted", TIED, ids=str)
@pytest.mark.parametrize("written", TIED, ids=str)
def test_any_layout_of_a_tied_head_from_any_other(saved, written, wanted):
    assert_loads_as(saved(written), wanted)


@pytest.mark.parametrize("written", [Layout(dp=3, zero=True), Layout(pp=2, tp=2)], ids=str)
def test_fp32_weights_have_no_masters(tmp_path, written):
    save_grid(tmp_path, ranks(replace(written, dtype=torch.float32)))
    assert_loads_as(tmp_path, Layout(tp=2, dp=2, zero=True, dtype=torch.float32))


def assert_loads_as(root, layout):
    for wanted in ranks(layout):
        loaded, target = load_rank(root, wanted)
        assert target.same_as(wanted), wanted.holding.position
        assert loaded.run_state == RunState(5, 40, 4, 1, {"value": 1024.0})
        assert loaded.optimizer_restored


fractions = st.lists(st.floats(0, 1), min_size=1, max_size=4).map(tuple)
sizes = st.sampled_from([1, 2, 4])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    written=st.builds(Layout, sizes, st.sampled_from([1, 2]), st.integers(1, 4), st.booleans(), cuts=fractions),
    wanted=st.builds(Layout, sizes, st.sampled_from([1, 2]), st.integers(1, 4), st.booleans(), cuts=fractions),
    tied=st.booleans(),
)
def test_runs_may_be_cut_anywhere(tmp_path_factory, written, wanted, tied):
    root = tmp_path_factory.mktemp("cut")
    save_grid(root, ranks(replace(written, tied=tied)))
    assert_loads_as(root, replace(wanted, tied=tied))


def test_one_process_reads_the_weights_of_any_run(saved):
    for layout in UNTIED:
        weights = {name: torch.zeros(shape) for name, (shape, _) in parameters().items()}
        loaded = load_checkpoint(saved(layout), weights=weights)
        assert not loaded.optimizer_restored
        for name, tensor in weights.items():
            assert torch.equal(tensor, full(name, "weight", tensor.shape).bfloat16().float())


def test_names_of_files(saved):
    directory = saved(Layout(tied=True, pp=2, tp=2, dp=2, zero=True)) / "global_step5"
    names = {path.name for path in directory.iterdir()}
    assert {name for name in names if name.startswith("layer_000")} == {
        "layer_000.tensor_00_of_02.safetensors",
        "layer_000.tensor_01_of_02.safetensors",
    }
    # The final norm is whole: one file has it. No file has a tied head.
    assert [name for name in names if "layer_003" in name and not name.startswith("optimizer")] == [
        "layer_003.tensor_00_of_02.safetensors"
    ]
    assert not any("layer_004" in name for name in names)
    assert {name for name in names if name.startswith("optimizer_layer_000")} == {
        f"optimizer_layer_000.{stage}tensor_0{tensor}_of_02.data_0{data}_of_02.safetensors"
        for stage in ("", "stage_01_of_02.")
        for tensor in (0, 1)
        for data in (0, 1)
    }
    assert "random_rank_001.stage_01_of_02.tensor_00_of_02.safetensors" in names
    # Without ZeRO both stages of a tied weight have all of its state, and the first writes it.
    assert not list((saved(Layout(tied=True, pp=2)) / "global_step5").glob("optimizer*stage*"))
    plain = {path.name for path in (saved(Layout()) / "global_step5").iterdir()}
    assert {"layer_003.safetensors", "optimizer_layer_003.safetensors", "random_rank_000.safetensors"} <= plain


def test_a_weight_is_read_as_the_documentation_says(saved):
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    (recipe,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace = {}
    exec(recipe, namespace)
    for layout in (Layout(), Layout(tp=4, dp=2), Layout(pp=4, tp=2, dp=2, zero=True)):
        directory = saved(layout) / "global_step5"
        for name, (shape, _) in parameters().items():
            assert torch.equal(namespace["read_weight"](directory, name), full(name, "weight", shape).bfloat16())


def test_the_documentation_shows_what_is_in_a_manifest(saved):
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    manifest = json.loads((saved(Layout(tp=2, dp=2, zero=True)) / "global_step5" / "manifest.json").read_text())
    shown = [json.loads("{" + block + "}") if block[0] == '"' else json.loads(block) for block in json_blocks(text)]
    (name, parameter), file = *shown[0].items(), shown[1]
    assert manifest["parameters"][name] == parameter
    (entry,) = [entry for entry in manifest["files"] if entry["name"] == file["name"]]
    assert entry.keys() == file.keys()
    assert entry["pieces"] == file["pieces"]


def json_blocks(text):
    return re.findall(r"```json\n(.*?)```", text, re.DOTALL)


def test_slices_are_the_same_only_if_cut_the_same_way():
    gated = ParameterLayout((24, 8), 0, 2, 2)
    assert gated.has_slices_of(ParameterLayout((24, 8), 0, 2, 2))
    assert not gated.has_slices_of(ParameterLayout((24, 8), 0, 1, 2))
    assert not gated.has_slices_of(ParameterLayout((24, 8), 1, 2, 2))
    assert ParameterLayout((24, 8)).has_slices_of(ParameterLayout((24, 8), 0, 2, 1))


def test_a_rank_reads_its_own_files_only(tmp_path):
    """Where nothing changed, a rank of many judges and reads a share of the bytes."""
    layout = Layout(tp=2, dp=2, zero=True)
    directory = save_grid(tmp_path, ranks(layout))
    for path in directory.glob("*tensor_01*"):
        path.write_bytes(bytes(path.stat().st_size))
    for path in directory.glob("optimizer*data_01*"):
        path.write_bytes(bytes(path.stat().st_size))
    # The norm's state is dealt out over both tensor ranks, but each reads the run it wrote.
    wanted = rank_of(layout, layout.grid[0])
    assert load_rank(tmp_path, wanted)[1].same_as(wanted)


def test_random_states(tmp_path, caplog):
    layout = Layout(pp=2, tp=2, dp=2)
    save_grid(tmp_path, ranks(layout))
    for wanted in ranks(layout):
        position = wanted.holding.position
        seed = 100 * position.stage + position.data_rank
        assert seeded_with(seed, load_rank(tmp_path, wanted)[0].random_state)
    # New tensor ranks go on as those beside them; new data ranks and stages start streams of their own.
    new_tensor_rank = position_of(tp=4, pp=2, dp=2, tensor=3, stage=1, data=1)
    assert seeded_with(101, load_rank(tmp_path, new_tensor_rank)[0].random_state)
    assert "no random state" not in caplog.text
    new = [position_of(dp=4, data=2), position_of(dp=4, data=3), position_of(pp=4, stage=2), position_of(pp=4, stage=3)]
    states = [load_rank(tmp_path, rank)[0].random_state.torch_cpu for rank in new]
    assert len({tuple(state.tolist()) for state in states}) == 4
    assert "no random state for data rank 0 of stage 3" in caplog.text
    alike = [position_of(dp=4, tp=2, data=2, tensor=tensor) for tensor in (0, 1)]
    for rank in alike:
        assert torch.equal(load_rank(tmp_path, rank)[0].random_state.torch_cpu, states[0])


def position_of(*, stage=0, data=0, tensor=0, **sizes):
    layout = Layout(**sizes)
    return rank_of(layout, GridPosition(stage, data, tensor, layout.grid[0].sizes))


def seeded_with(seed, state):
    return torch.equal(state.torch_cpu, torch.Generator().manual_seed(seed).get_state())


def test_manifest_lists_what_was_dealt_out(saved):
    manifest = open_checkpoint(saved(Layout(pp=4, tp=2, dp=2, zero=True)) / "global_step5").manifest
    assert manifest.parameters.keys() == parameters().keys()
    assert manifest.parameters[HEAD].layout.shape == (12, 6)
    assert manifest.parameters[EMBEDDING].state == ("exp_avg", "exp_avg_sq", "master")
    assert manifest.parameters[EMBEDDING].counters == ("step",)
    assert Holding().layout(HEAD, torch.zeros(12, 6)).num_slices == 1
