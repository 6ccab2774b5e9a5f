"""The rank grid: every rank's place on the pipe, data and tensor axes, and the process groups along them.

Built once at start from DeepSpeed's topology and passed by hand; nothing in this project looks a group up globally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from megatron.errors import ConfigError

_TOPOLOGY_NAMES = {"pipe": "pipe", "data": "data", "tensor": "model"}


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ from this one along some axes of the grid only, this rank included.

    `axis` names the axes. `ranks` are global ranks in ascending order, which is axis order along a single axis; `rank`
    is this rank's index among them. `handle` is None when the group has one member, so that nothing can communicate in
    it by accident.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return len(self.ranks)


@dataclass(frozen=True)
class ParallelGrid:
    """This rank's groups. `topology` is what DeepSpeed's pipeline is built with.

    `pipe`, `data` and `tensor` are the groups along one axis; `stage` has all ranks of this stage, `model` all ranks
    that hold one copy of the model, and `tied` the data ranks of first and last stage together, for a weight that both
    hold. `tied` is None on the stages in between.
    """

    topology: PipeModelDataParallelTopology
    pipe: AxisGroup
    data: AxisGroup
    tensor: AxisGroup
    stage: AxisGroup
    model: AxisGroup
    tied: AxisGroup | None

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole grid."""
        return self.pipe.size * self.data.size * self.tensor.size

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank's stage reads the tokens."""
        return self.pipe.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's stage has the loss."""
        return self.pipe.rank == self.pipe.size - 1

    @property
    def groups(self) -> tuple[AxisGroup, ...]:
        """The groups in the order in which every rank created them."""
        return (self.pipe, self.data, self.tensor, self.stage, self.model, *([self.tied] if self.tied else []))


def build_grid(*, pipe_parallel_size: int, model_parallel_size: int, timeout: timedelta | None = None) -> ParallelGrid:
    """Arrange all ranks of the initialised default group; the data axis takes what the other two leave.

    Collective over the world: every rank must call it, at the same point. Tensor ranks are neighbours, then data ranks,
    then stages, as DeepSpeed's `PipeModelDataParallelTopology` lays them out. A collective of a group fails after
    `timeout`; None is the backend's default, whatever the default group has.

    Raises ConfigError when the world size is not a multiple of pipe x tensor.
    """
    world_size = dist.get_world_size()
    model_ranks = pipe_parallel_size * model_parallel_size
    if world_size % model_ranks:
        raise ConfigError(
            f"{world_size} ranks cannot be divided into pipe_parallel_size {pipe_parallel_size} x "
            f"model_parallel_size {model_parallel_size} = {model_ranks} ranks for each copy of the model"
        )
    topology = PipeModelDataParallelTopology(
        num_pp=pipe_parallel_size, num_mp=model_parallel_size, num_dp=world_size // model_ranks
    )
    groups = _GroupMaker(topology, timeout)
    return ParallelGrid(
        topology=topology,
        pipe=groups.along("pipe"),
        data=groups.along("data"),
        tensor=groups.along("tensor"),
        stage=groups.along("data", "tensor"),
        model=groups.along("pipe", "tensor"),
        tied=groups.of_both_ends(),
    )


class _GroupMaker:
    """Creates groups, on all ranks in the same order. Two groups of the same ranks share one communicator."""

    def __init__(self, topology: PipeModelDataParallelTopology, timeout: timedelta | None) -> None:
        self._topology = topology
        self._timeout = timeout
        self._handles: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def along(self, *axes: str) -> AxisGroup:
        """Return this rank's group along `axes`."""
        mine = self._create(" x ".join(axes), axes, range(dist.get_world_size()))
        assert mine is not None
        return mine

    def of_both_ends(self) -> AxisGroup | None:
        """Return the data ranks of first and last stage that share this tensor rank; None in a stage between."""
        last = self._topology.get_dim("pipe") - 1
        at_ends = [rank for rank in range(dist.get_world_size()) if self._topology.get_coord(rank).pipe in (0, last)]
        return self._create("first and last stage x data", ("pipe", "data"), at_ends)

    def _create(self, name: str, axes: Sequence[str], ranks: Sequence[int]) -> AxisGroup | None:
        """Divide `ranks` into those that differ along `axes` only, create every such group, return this rank's."""
        varying = {_TOPOLOGY_NAMES[axis] for axis in axes}
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            place = self._topology.get_coord(rank)._asdict()
            fixed = tuple(index for axis, index in place.items() if axis not in varying)
            lines.setdefault(fixed, []).append(rank)
        me = dist.get_rank()
        mine: AxisGroup | None = None
        for line in map(tuple, lines.values()):
            if line not in self._handles:
                self._handles[line] = dist.new_group(list(line), timeout=self._timeout) if len(line) > 1 else None
            if me in line:
                mine = AxisGroup(axis=name, ranks=line, rank=line.index(me), handle=self._handles[line])
        return mine


def warm_up(grid: ParallelGrid, device: torch.device) -> None:
    """Make each group's communicator now: backends create them at first use, where memory may be full or time short.

    Collective over every group of the grid.
    """
    for group in grid.groups:
        if group.handle is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group.handle)
