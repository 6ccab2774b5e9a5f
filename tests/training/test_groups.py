"""Contract line 37, the groups of a run: communicators exist before anything needs them, and none outlives the run."""

from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.data_parallel.roll_call import RollCall
from megatron.launch.environment import RankInfo
from megatron.mpu.grid import ParallelGrid
from megatron.training import run as training_run
from megatron.training import setup
from megatron.training.join_ranks import JoinedRank
from tests.distributed.ranks import run_ranks
from tests.training.in_process import set_up_run, smoke_args, stages
from tests.training.runs import write_corpus

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return {"data_path": str(write_corpus(tmp_path_factory.mktemp("corpus")))}


class _EnoughError(Exception):
    pass


def _at_start(rank, settings):
    """Go no further than the grid and what comes right after it; return how often each group of the grid was used."""
    used, grids = Counter(), []
    build_grid, all_reduce = setup.build_grid, dist.all_reduce

    def build(**options) -> ParallelGrid:
        grids.append(build_grid(**options))
        return grids[0]

    def counted(tensor, group=None, **options):
        used[group] += 1
        return all_reduce(tensor, group=group, **options)

    def enough(*_):
        raise _EnoughError

    setup.build_grid, setup.build_tokenizer, dist.all_reduce = build, enough, counted
    try:
        set_up_run(settings)
    except _EnoughError:
        return {group.axis: used[group.handle] for group in grids[0].groups if group.handle is not None}


def test_contract_37_every_group_is_warmed_up_before_anything_else_of_a_run_is_built(corpus):
    for used in run_ranks(4, _at_start, {**corpus, **stages(2)}):
        assert len(used) == 5, "with two stages of two data ranks only the tensor group has one rank"
        assert all(used.values()), used


class _Watched:
    """A collective in flight that knows whether somebody has waited for it."""

    def __init__(self, work):
        self._work, self.waited = work, False

    def wait(self, *timeout):
        self.waited = True
        return self._work.wait(*timeout)

    def __getattr__(self, name):
        return getattr(self._work, name)


def _until_exit(rank, settings, failing_step):
    """Run to the end or into an error; return what ended it, collectives never waited for, and groups destroyed."""
    works, at_exit, num_backwards = [], [], 0
    starts = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}

    def watched(start):
        def call(*args, **options):
            work = start(*args, **options)
            if options.get("async_op"):
                works.append(work := _Watched(work))
            return work

        return call

    def failing_backward(tensor, *args, **options):
        nonlocal num_backwards
        num_backwards += 1
        if num_backwards == failing_step:
            tensor.register_hook(lambda _: (_ for _ in ()).throw(_EnoughError("enough")))
        return backward(tensor, *args, **options)

    def destroy(group=None):
        at_exit.append(sum(not work.waited for work in works))

    backward, torch.Tensor.backward = torch.Tensor.backward, failing_backward
    for name, start in starts.items():
        setattr(dist, name, watched(start))
    training_run.join_ranks = lambda *_: JoinedRank(
        torch.device("cpu"), timedelta(seconds=60), RollCall(dist.HashStore(), 0.1)
    )
    really_destroy, dist.destroy_process_group = dist.destroy_process_group, destroy
    try:
        ended = training_run.train_run(smoke_args(settings), RankInfo(rank, 2, rank, 2, "", 0, "a test"))
    except _EnoughError as error:
        ended = str(error)
    torch.Tensor.backward, dist.destroy_process_group = backward, really_destroy
    return ended, len(works), at_exit


@pytest.mark.parametrize(("failing_step", "end"), [(0, 0), (3, "enough")], ids=["at the end", "after an error"])
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_contract_37_exit_leaves_no_work_pending_and_destroys_the_groups(corpus, zero_stage, failing_step, end):
    settings = {
        **corpus,
        "train_iters": 3,
        "lr_decay_iters": 3,
        "log_dir": None,
        "zero_optimization": {"stage": zero_stage},
    }
    for ended, num_works, at_exit in run_ranks(2, _until_exit, settings, failing_step):
        assert ended == end
        assert num_works > 3
        assert at_exit == [0]
