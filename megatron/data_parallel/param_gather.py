"""Sharded parameters: each rank updates its shard of a bucket, and the shards are gathered into whole parameters.

The last leg of the journey where optimizer state is sharded: reduce-scatter -> update of the shard -> all-gather. With
overlap the gathers go on under the next forward, and each part of the model waits for its own just before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from megatron.data_parallel.collective import Collective, all_gather, shards_bytes_sent
from megatron.data_parallel.exposure import CollectiveTimes, clock_for
from megatron.data_parallel.partition import BucketPlan, ReductionPlan


class ParameterGather:
    """Keeps the parameters of each sharded bucket in one flat buffer, laid out as their gradients are.

    The parameters are moved there: their `.data` becomes a view of the buffer, so that a gather writes into the module.
    With `overlapped_by`, the module whose forward needs them, `run` does not wait for what it starts: each part of that
    module waits for the parameters it holds itself, right before it runs. Others use such a parameter only once one of
    those parts has run, and whoever reads parameters outside forward calls `wait` first.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        plan: ReductionPlan,
        *,
        overlapped_by: torch.nn.Module | None = None,
    ) -> None:
        self._buckets = [
            _FlatParameters(bucket, {slot.name: parameters[slot.name] for slot in bucket.slots})
            for bucket in plan.buckets
            if bucket.sharded
        ]
        self.collectives: list[CollectiveTimes] = []
        """The last gathers that everybody has waited for: with overlap those that the last forward needed."""
        self._hooks = [] if overlapped_by is None else self._wait_before_use(overlapped_by)

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
        """Make every parameter whole again, from the shards its ranks have updated; with overlap only start to.

        Collective over the groups of all sharded buckets. They go in the order in which forward needs them, which is
        the plan's backwards.
        """
        self.wait()
        self.collectives = self._times()
        for bucket in reversed(self._buckets):
            bucket.launch()
        if not self._hooks:
            self.wait()
            self.collectives = self._times()

    def wait(self) -> None:
        """Wait until every parameter is whole, on the host or for the current stream."""
        _wait_for(self._buckets[::-1])

    def close(self) -> None:
        """Wait, and take the hooks off the module."""
        self.wait()
        for hook in self._hooks:
            hook.remove()

    def _times(self) -> list[CollectiveTimes]:
        return [bucket.collective.times for bucket in reversed(self._buckets) if bucket.collective is not None]

    def _wait_before_use(self, module: torch.nn.Module) -> list[RemovableHandle]:
        """Hook the parts of `module` that hold parameters of sharded buckets; return the hooks."""
        hooks = []
        for part in module.modules():
            own = {id(parameter) for parameter in part.parameters(recurse=False)}
            needed = [bucket for bucket in reversed(self._buckets) if not own.isdisjoint(bucket.parameter_ids)]
            if needed:
                hooks.append(part.register_forward_pre_hook(lambda *_, needed=needed: _wait_for(needed)))
        return hooks


class _FlatParameters:
    """The parameters of one bucket as one buffer."""

    def __init__(self, plan: BucketPlan, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.plan = plan
        self.parameter_ids = {id(parameter) for parameter in parameters.values()}
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
        if self.collective is not None:
            self.collective.wait()


def _wait_for(buckets: Sequence[_FlatParameters]) -> None:
    for bucket in buckets:
        bucket.wait()
