"""Contract line 9: every stage launches under its own last backward, and no launch or wait holds a neighbour up."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.distributed.toy import assert_same_bits
from tests.engine.stage_engine import stage_engine, step_batches, weights_of

pytestmark = pytest.mark.distributed

PATIENCE = timedelta(seconds=20)
LATE = 3  # data rank 1 of the last of two stages


def _engine_and_launches(**options):
    """Return an engine, and a list that gets the buckets launched when each step's last backward has ended."""
    engine, grid = stage_engine(**options)
    reducer, finish, launched = engine._reducer, engine._reducer.finish, []

    def noting():
        launched.append([times.bucket for times in reducer.collectives])
        finish()

    reducer.finish = noting
    return engine, grid, launched


def _launched_in_backward(rank, pipe):
    found = {}
    for tied in (False, True):
        engine, grid, launched = _engine_and_launches(pipe=pipe, tied=tied, accumulation=4)
        for step in (1, 2):
            engine.train_batch(step_batches(step, grid.data.rank, 4))
        found[tied] = launched, [bucket.plan.index for bucket in engine._reducer._buckets]
    return found


@pytest.mark.parametrize(("world_size", "pipe"), [(4, 2), (4, 4)])
def test_contract_09_every_stage_launches_all_its_buckets_in_its_own_last_backward(world_size, pipe):
    for stage, found in enumerate(run_ranks(world_size, _launched_in_backward, pipe)):
        for tied, (launched, buckets) in found.items():
            assert launched == [buckets, buckets]
            shared = world_size > pipe or (tied and stage in (0, pipe - 1))
            assert bool(buckets) == shared


def _delayed(rank, zero_stage):
    """Train with the delay; return the rank's stage, launches in backward, buckets, and weights without overlap too."""
    options = {"pipe": 2, "tied": True, "accumulation": 4, "zero_stage": zero_stage}
    engine, grid, launched = _engine_and_launches(**options, delay_on_later_stages=True)
    quiet, _ = stage_engine(**options, overlap=False)
    for step in (1, 2):
        for each in (engine, quiet):
            each.train_batch(step_batches(step, grid.data.rank, 4))
    passes = (
        []
        if zero_stage < 2
        else [b.plan.index for _ in range(3) for b in engine._reducer._buckets if b.transient_buffer]
    )
    whole = [bucket.plan.index for bucket in engine._reducer._buckets]
    return (
        grid.pipe.rank,
        [sorted(each) for each in launched],
        sorted(passes),
        sorted(passes + whole),
        weights_of(engine),
        weights_of(quiet),
    )


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_contract_09_later_stages_leave_the_link_to_the_first_when_they_are_told_to(zero_stage):
    for stage, launched, before_the_last, all_of_them, weights, quiet in run_ranks(4, _delayed, zero_stage):
        assert launched == [before_the_last if stage else all_of_them] * 2
        assert_same_bits(weights, quiet)


def _waits_before_launching(store, bucket, keys):
    real = bucket.launch

    def launch():
        store.wait(keys, PATIENCE)
        real()

    bucket.launch = launch


def _last_stage_is_late(rank, folder):
    """Rank 3 launches nothing before ranks 0 and 2 have ended all their backward passes, which pass gradients on."""
    store = dist.FileStore(f"{folder}/stages", dist.get_world_size())
    engine, grid, launched = _engine_and_launches(pipe=2, tied=True, accumulation=4)
    reducer, finish = engine._reducer, engine._reducer.finish
    if rank == LATE:
        _waits_before_launching(store, reducer._buckets[0], ["ended/0", "ended/2"])

    def said():
        store.set(f"ended/{rank}", "")
        finish()

    reducer.finish = said
    result = engine.train_batch(step_batches(1, grid.data.rank, 4))
    quiet, _ = stage_engine(pipe=2, tied=True, accumulation=4, overlap=False)
    expected = quiet.train_batch(step_batches(1, grid.data.rank, 4))
    rows = [(float(each.loss), float(each.grad_norm)) for each in (result, expected)]
    return launched[0], len(reducer._buckets), rows, weights_of(engine), weights_of(quiet)


def test_contract_09_launching_never_blocks_while_a_data_rank_has_not_joined(tmp_path):
    for launched, num_buckets, rows, weights, quiet in run_ranks(4, _last_stage_is_late, str(tmp_path)):
        assert launched == list(range(num_buckets)) and num_buckets > 3
        assert rows[0] == rows[1]
        assert_same_bits(weights, quiet)


def _first_stage_is_late_with_the_tied_weight(rank, folder):
    """The first stage does not join the tied sum before the last has all its other averages."""
    store = dist.FileStore(f"{folder}/stages", dist.get_world_size())
    engine, grid, _ = _engine_and_launches(pipe=2, tied=True, accumulation=4)
    *others, tied = engine._reducer._buckets
    if grid.is_first_stage:
        _waits_before_launching(store, tied, ["averaged/2", "averaged/3"])
    else:
        wait = others[-1].wait

        def noted():
            wait()
            store.set(f"averaged/{rank}", "")

        others[-1].wait = noted
    engine.train_batch(step_batches(1, grid.data.rank, 4))
    return tied.plan.group.name, len(others)


def test_contract_09_no_stage_waits_for_the_tied_sum_of_another(tmp_path):
    for last_group, num_others in run_ranks(4, _first_stage_is_late_with_the_tied_weight, str(tmp_path)):
        assert last_group == "tied" and num_others > 2
