"""Exchanges that give each rank a sum of its shard of the bucket, made in the accumulation dtype.

A backend's own reduce-scatter is used where it sums in the dtype gradients are accumulated in. Otherwise each rank
sends every other its shard and sums what it receives itself: gloo's reduce-scatter is an all-reduce inside, with twice
the bytes, and any backend that is given bf16 also sums in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.data_parallel.arithmetic import ReductionArithmetic, scaled
from megatron.data_parallel.buffer_pool import BufferPool
from megatron.data_parallel.collective import Collective, all_gather, reduce_scatter, shards_bytes_sent
from megatron.data_parallel.exposure import Clock, CollectiveTimes, Mark
from megatron.data_parallel.partition import BucketPlan


@dataclass(frozen=True)
class _Scatter:
    """One reduce-scatter in flight: what was sent, and this rank's shard, of every rank or summed already."""

    collective: Collective
    sent: torch.Tensor
    received: torch.Tensor


class ReduceScatter:
    """Each rank gets the averages of its shard. Several launches in a step add up, each waited for before the next.

    `gives_back` says that buffers come from the pool and return to it when they have been sent.
    """

    def __init__(
        self,
        plan: BucketPlan,
        arithmetic: ReductionArithmetic,
        clock: Clock,
        pool: BufferPool,
        *,
        gives_back: bool = False,
    ) -> None:
        self._plan, self._arithmetic, self._clock, self._pool = plan, arithmetic, clock, pool
        self._gives_back = gives_back
        self._native = (
            dist.get_backend(plan.group.handle) != "gloo" and arithmetic.wire_dtype == arithmetic.accumulation_dtype
        )
        self.factor_before, self._factor_after = arithmetic.factors(plan.group, backend_averages=self._native)
        shard_elements = plan.num_elements // plan.group.size
        self._shard = pool.take(shard_elements, arithmetic.accumulation_dtype)
        self._shard_written = False
        self._in_flight: _Scatter | None = None
        self.times: list[CollectiveTimes] = []

    def begin_step(self) -> None:
        """Start the sums anew."""
        assert self._in_flight is None, f"bucket {self._plan.index} is still in flight"
        self._shard_written = False
        self.times = []

    def launch(self, buffer: torch.Tensor, ready: Mark | None) -> None:
        """Start the reduce-scatter."""
        assert self._in_flight is None, f"bucket {self._plan.index} is still in flight"
        group, wire = self._plan.group, buffer.to(self._arithmetic.wire_dtype)
        received = self._pool.take(len(self._shard) if self._native else wire.numel(), wire.dtype)
        operation = self._arithmetic.operation(group)

        def start() -> dist.Work:
            if self._native:
                return reduce_scatter(received, wire, op=operation, group=group.handle, async_op=True)
            return dist.all_to_all_single(received, wire, group=group.handle, async_op=True)

        collective = Collective(
            start,
            self._clock,
            bucket=self._plan.index,
            kind="reduce_scatter",
            bytes_sent=shards_bytes_sent(wire.nbytes, group.size),
            ready=ready,
        )
        self.times.append(collective.times)
        self._in_flight = _Scatter(collective, buffer, received)

    def start_last_stage(self) -> None:
        """Nothing to start."""

    def wait(self) -> torch.Tensor:
        """Return this rank's shard, of everything launched so far."""
        if self._in_flight is not None:
            self._take_in(self._in_flight)
            self._in_flight = None
        return self._shard

    def _take_in(self, scatter: _Scatter) -> None:
        """Add one landed reduce-scatter to the shard."""
        scatter.collective.wait()
        contributions = scatter.received.view(-1, len(self._shard))
        if self._shard_written:
            self._shard.add_(contributions.sum(dim=0, dtype=self._shard.dtype), alpha=self._factor_after)
        else:
            scaled(torch.sum(contributions, dim=0, dtype=self._shard.dtype, out=self._shard), self._factor_after)
        self._shard_written = True
        self._pool.give_back(scatter.received)
        if self._gives_back:
            self._pool.give_back(scatter.sent)


class ReduceScatterAllGather:
    """Every rank gets all averages, as from an all-reduce, of sums made in the accumulation dtype.

    The bytes are those of an all-reduce. The gather cannot start before the scatter has landed, which is waited for
    only after backward: launching it from a hook would block, or change the order between ranks.
    """

    def __init__(self, plan: BucketPlan, arithmetic: ReductionArithmetic, clock: Clock, pool: BufferPool) -> None:
        self._plan, self._arithmetic, self._clock = plan, arithmetic, clock
        self._scatter = ReduceScatter(plan, arithmetic, clock, pool)
        self.factor_before = self._scatter.factor_before
        self._buffer: torch.Tensor | None = None
        self._wire: torch.Tensor | None = None
        self._gather: Collective | None = None

    def begin_step(self) -> None:
        """Forget the last step."""
        self._scatter.begin_step()
        self._gather = None

    def launch(self, buffer: torch.Tensor, ready: Mark | None) -> None:
        """Start the reduce-scatter."""
        self._buffer = buffer
        self._scatter.launch(buffer, ready)

    def start_last_stage(self) -> None:
        """Wait for the shard and start to gather it."""
        group, shard = self._plan.group, self._scatter.wait().to(self._arithmetic.wire_dtype)
        wire = shard.new_empty(self._plan.num_elements)
        self._wire = wire
        self._gather = Collective(
            lambda: all_gather(wire, shard, group=group.handle, async_op=True),
            self._clock,
            bucket=self._plan.index,
            kind="all_gather",
            bytes_sent=shards_bytes_sent(wire.nbytes, group.size),
        )

    def wait(self) -> torch.Tensor:
        """Return the buffer, now full of averages."""
        assert self._buffer is not None and self._gather is not None and self._wire is not None
        self._gather.wait()
        self._buffer.copy_(self._wire)
        self._wire = None
        return self._buffer

    @property
    def times(self) -> list[CollectiveTimes]:
        """Both collectives of the last step."""
        return [*self._scatter.times, *([] if self._gather is None else [self._gather.times])]
