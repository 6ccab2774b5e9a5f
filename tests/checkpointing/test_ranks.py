"""Several processes save one checkpoint: two data ranks, and two pipeline stages."""

import multiprocessing
from dataclasses import replace

import pytest
import torch

from megatron.checkpointing import (
    GridPosition,
    Holding,
    ParallelSizes,
    RandomState,
    SaveRole,
    durable,
    load_checkpoint,
    open_checkpoint,
    save,
)
from megatron.errors import CheckpointError
from tests.checkpointing.grid_runs import roles_in_turn
from tests.checkpointing.runs import ALONE, blank, optimizer_state, save_alone, snapshot, weights

TIMEOUT_S = 60


class Agreement:
    """All ranks pass a flag and learn whether all were True; one slot a rank, two barriers a call."""

    def __init__(self, context, size):
        self.barrier = context.Barrier(size, timeout=TIMEOUT_S)
        self.flags = context.Array("b", size)

    def __call__(self, rank, ok):
        self.flags[rank] = ok
        self.barrier.wait()
        everyone = all(self.flags)
        self.barrier.wait()
        return everyone


def run_rank(root, rank, agreement, outcome, fails):
    if fails:
        durable.write_file = lambda path, content: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    position = GridPosition(data_rank=rank, sizes=ParallelSizes(dp=2))
    content = replace(snapshot(7), random_state=RandomState.from_seed(rank), holding=Holding(position))
    try:
        save(root, content, role=SaveRole.of_rank(rank, 2, position), agree=lambda ok: agreement(rank, ok))
        outcome.put((rank, "saved"))
    except CheckpointError as error:
        outcome.put((rank, str(error)))


def run_two_ranks(root, failing_rank=None):
    context = multiprocessing.get_context("fork")
    agreement, outcome = Agreement(context, 2), context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(root, rank, agreement, outcome, rank == failing_rank)) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    outcomes = dict(outcome.get(timeout=TIMEOUT_S) for _ in ranks)
    for process in ranks:
        process.join(TIMEOUT_S)
    return outcomes


def test_two_data_ranks(tmp_path):
    assert run_two_ranks(tmp_path) == {0: "saved", 1: "saved"}
    reader = open_checkpoint(tmp_path / "global_step7")
    reader.verify()
    assert reader.manifest.parallel_sizes == ParallelSizes(dp=2)
    for rank in (0, 1):
        found = reader.random_state(reader.random_source(GridPosition(data_rank=rank)))
        assert torch.equal(found.torch_cpu, RandomState.from_seed(rank).torch_cpu)
    assert sum(name.name.startswith("layer_") for name in reader.manifest.files) == 3


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_one_rank_fails_all_ranks_know(tmp_path, failing_rank):
    save_alone(tmp_path, 6)
    outcomes = run_two_ranks(tmp_path, failing_rank)
    assert "No space left on device" in outcomes[failing_rank]
    assert "another rank failed" in outcomes[1 - failing_rank]
    assert load_checkpoint(tmp_path, weights=blank(weights())).run_state.iteration == 6


def split_by_layer(content, stage, layers):
    def mine(named):
        return {name: value for name, value in named.items() if int(name.split(".")[1]) in layers}

    holding = Holding(GridPosition(stage, sizes=ParallelSizes(pp=2)), layers=layers)
    return replace(
        content, weights=mine(content.weights), optimizer_state=mine(content.optimizer_state), holding=holding
    )


def test_pipeline_stages_write_the_same_files_as_one(tmp_path):
    whole = snapshot(7)
    alone = save_alone(tmp_path / "alone", 7)
    stages = [split_by_layer(whole, stage, layers) for stage, layers in enumerate(([0], [1, 10]))]
    roles = [SaveRole.of_rank(stage, 2, content.holding.position) for stage, content in enumerate(stages)]
    staged = roles_in_turn(tmp_path / "staged", stages, roles)
    files = {path.name for path in alone.iterdir()}
    random_files = {f"random_rank_000.stage_0{stage}_of_02.safetensors" for stage in (0, 1)}
    assert files - {"random_rank_000.safetensors"} == {path.name for path in staged.iterdir()} - random_files
    for name in files:
        if name not in ("manifest.json", "random_rank_000.safetensors"):
            assert (alone / name).read_bytes() == (staged / name).read_bytes()
    assert optimizer_state(7).keys() == weights(7).keys()


def test_overlapping_roles_are_refused(tmp_path):
    roles = [replace(ALONE, world_size=2), SaveRole(1, 2, frozenset({"weights"}))]
    with pytest.raises(CheckpointError, match="more than one rank wrote layer_000"):
        roles_in_turn(tmp_path, [snapshot(7)] * 2, roles)


def test_absent_rank_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"rank\(s\) 1, 2 did not write"):
        save(tmp_path, snapshot(7), role=replace(ALONE, world_size=3), agree=bool)
    assert not (tmp_path / "latest").exists()
