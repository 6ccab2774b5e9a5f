"""The rank grid: every rank's place on the pipe, data and tensor axes, and the process groups along them.

Built once at start from DeepSpeed's topology and passed by hand; nothing in this project looks a group up globally.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from megatron.errors import ConfigError

_TOPOLOGY_NAMES = {"pipe": "pipe", "data": "data", "tensor": "model"}


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that differ from this one along a single axis of the grid, this rank included.

    `ranks` are global ranks in axis order, `rank` is this rank's index among them. `handle` is None when the group has
    one member, so that nothing can communicate in it by accident.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return len(self.ranks)


@dataclass(frozen=True)
class ParallelGrid:
    """This rank's groups along each axis. `topology` is what DeepSpeed's pipeline is built with."""

    topology: PipeModelDataParallelTopology
    pipe: AxisGroup
    data: AxisGroup
    tensor: AxisGroup

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole grid."""
        return self.pipe.size * self.data.size * self.tensor.size

    @property
    def groups(self) -> tuple[AxisGroup, ...]:
        """The axis groups in the order in which every rank created them."""
        return (self.pipe, self.data, self.tensor)


def build_grid(*, pipe_parallel_size: int, model_parallel_size: int) -> ParallelGrid:
    """Arrange all ranks of the initialised default group; the data axis takes what the other two leave.

    Collective over the world: every rank must call it, at the same point. Tensor ranks are neighbours, then data ranks,
    then stages, as DeepSpeed's `PipeModelDataParallelTopology` lays them out.

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
    return ParallelGrid(
        topology=topology,
        pipe=_axis_group(topology, "pipe"),
        data=_axis_group(topology, "data"),
        tensor=_axis_group(topology, "tensor"),
    )


def _axis_group(topology: PipeModelDataParallelTopology, axis: str) -> AxisGroup:
    """Create every group along `axis`, on all ranks in the same order, and keep the one this rank is in."""
    me = dist.get_rank()
    mine: AxisGroup | None = None
    for ranks in topology.get_axis_comm_lists(_TOPOLOGY_NAMES[axis]):
        handle = dist.new_group(ranks) if len(ranks) > 1 else None
        if me in ranks:
            mine = AxisGroup(axis=axis, ranks=tuple(ranks), rank=ranks.index(me), handle=handle)
    assert mine is not None, f"rank {me} is in no group along {axis}"
    return mine


def warm_up(grid: ParallelGrid, device: torch.device) -> None:
    """Make each group's communicator now: backends create them at first use, where memory may be full or time short.

    Collective over every group of the grid.
    """
    for group in grid.groups:
        if group.handle is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group.handle)
