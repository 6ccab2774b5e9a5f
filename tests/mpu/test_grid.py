"""The rank grid against its definition, for every way of dividing four ranks."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.mpu.grid import build_grid, warm_up
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


def _grids(rank, sizes):
    results = []
    for pipe, tensor in sizes:
        grid = build_grid(pipe_parallel_size=pipe, model_parallel_size=tensor)
        warm_up(grid, torch.device("cpu"))
        sums = []
        for group in grid.groups:
            total = torch.tensor(float(rank))
            if group.handle is not None:
                dist.all_reduce(total, group=group.handle)
            sums.append(float(total))
        results.append(([(group.ranks, group.rank, group.size) for group in grid.groups], sums, grid.world_size))
    return results


def _expected(rank, pipe, tensor, world_size):
    """Tensor ranks are neighbours, then data ranks, then stages."""
    data = world_size // (pipe * tensor)
    place = {"pipe": rank // (data * tensor), "data": rank // tensor % data, "tensor": rank % tensor}

    def rank_at(**moved):
        at = {**place, **moved}
        return (at["pipe"] * data + at["data"]) * tensor + at["tensor"]

    sizes = {"pipe": pipe, "data": data, "tensor": tensor}

    def group(indices_of):
        """The ranks at every combination of the given indices, other axes fixed."""
        ranks = sorted(rank_at(**dict(zip(indices_of, at, strict=True))) for at in product(*indices_of.values()))
        return tuple(ranks), ranks.index(rank), len(ranks)

    along = [("pipe",), ("data",), ("tensor",), ("data", "tensor"), ("pipe", "tensor")]
    groups = [group({axis: range(sizes[axis]) for axis in axes}) for axes in along]
    if place["pipe"] in (0, pipe - 1):
        groups.append(group({"pipe": sorted({0, pipe - 1}), "data": range(data)}))
    return groups


def test_groups_are_the_lines_and_planes_of_the_grid_for_every_division_of_four_ranks():
    sizes = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
    for rank, results in enumerate(run_ranks(4, _grids, sizes)):
        for (pipe, tensor), (groups, sums, world_size) in zip(sizes, results, strict=True):
            assert groups == _expected(rank, pipe, tensor, 4)
            assert sums == [float(sum(ranks)) for ranks, _, _ in groups]
            assert world_size == 4


def _does_not_divide(rank):
    try:
        build_grid(pipe_parallel_size=2, model_parallel_size=1)
    except ConfigError as error:
        return str(error)


def test_a_world_that_does_not_divide_is_refused_with_its_numbers():
    assert all("3" in message and "2" in message for message in run_ranks(3, _does_not_divide))
