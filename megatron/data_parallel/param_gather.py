"""Sharded parameters: each rank updates its shard of a bucket, and the shards are gathered into whole parameters.

The last leg of the journey where optimizer state is sharded: reduce-scatter -> update of the shard -> all-gather.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.data_parallel.collective import Collective, all_gather, shards_bytes_sent
from megatron.data_parallel.exposure import CollectiveTimes, clock_for
from megatron.data_parallel.partition import BucketPlan, ReductionPlan


class ParameterGather:
    """Keeps the parameters of each sharded bucket in one flat buffer, laid out as their gradients are.

    The parameters are moved there: their `.data` becomes a view of the buffer, so that a gather writes into the module.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], plan: ReductionPlan) -> None:
        self._buckets = [
            _FlatParameters(bucket, {slot.name: parameters[slot.name] for slot in bucket.slots})
            for bucket in plan.buckets
            if bucket.sharded
        ]

    @property
    def runs(self) -> dict[str, range]:
        """By name, the elements of a parameter in memory order that this rank updates, where it has any."""
        return {
            slot.name: bucket.plan.run(slot)
            for bucket in self._buckets
            for slot in bucket.plan.slots
            if bucket.plan.run(slot)
        }

    @property
    def own_values(self) -> dict[str, torch.Tensor]:
        """The values of `runs`: flat views of the parameters."""
        return {
            slot.name: bucket.flat[slot.offset + run.start : slot.offset + run.stop]
            for bucket in self._buckets
            for slot in bucket.plan.slots
            if (run := bucket.plan.run(slot))
        }

    @property
    def names(self) -> set[str]:
        """All parameters that are gathered."""
        return {slot.name for bucket in self._buckets for slot in bucket.plan.slots}

    def run(self) -> None:
        """Make every parameter whole again, from the shards its ranks have updated.

        Collective over the groups of all sharded buckets, in plan order.
        """
        for bucket in self._buckets:
            bucket.launch()
        for bucket in self._buckets:
            bucket.wait()

    @property
    def collectives(self) -> list[CollectiveTimes]:
        """When the gathers of the last step were launched and landed, by bucket."""
        return [bucket.collective.times for bucket in self._buckets if bucket.collective is not None]


class _FlatParameters:
    """The parameters of one bucket as one buffer."""

    def __init__(self, plan: BucketPlan, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.plan = plan
        first = next(iter(parameters.values()))
        self.flat = torch.zeros(plan.num_elements, dtype=first.dtype, device=first.device)
        self.collective: Collective | None = None
        self._clock = clock_for(first.device)
        for slot in plan.slots:
            view = self.flat.as_strided(slot.shape, slot.stride, slot.offset)
            view.copy_(parameters[slot.name].detach())
            parameters[slot.name].data = view

    def launch(self) -> None:
        group, shard = self.plan.group, self.plan.shard
        self.collective = Collective(
            lambda: all_gather(self.flat, self.flat[shard.start : shard.stop], group=group.handle, async_op=True),
            self._clock,
            bucket=self.plan.index,
            kind="all_gather",
            bytes_sent=shards_bytes_sent(self.flat.nbytes, group.size),
        )

    def wait(self) -> None:
        assert self.collective is not None
        self.collective.wait()
