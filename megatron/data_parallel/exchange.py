"""How the contributions of a group's ranks become their average, and which part of it this rank gets.

Four ways, chosen for each bucket by `exchange_for`: nobody to exchange with; an all-reduce; a reduce-scatter, of which
this rank keeps its shard; and, for a narrow dtype on the wire, a reduce-scatter whose shards are gathered again.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from megatron.data_parallel.arithmetic import ReductionArithmetic, scaled
from megatron.data_parallel.buffer_pool import BufferPool
from megatron.data_parallel.collective import Collective, all_reduce_bytes_sent
from megatron.data_parallel.exposure import Clock, CollectiveTimes, Mark
from megatron.data_parallel.partition import BucketPlan
from megatron.data_parallel.reduce_scatter import ReduceScatter, ReduceScatterAllGather


class Exchange(Protocol):
    """Turns a bucket's buffer into averages. `factor_before` is for the caller to apply to what it writes there."""

    factor_before: float

    def begin_step(self) -> None:
        """Forget the last step. Nothing may be in flight."""
        ...

    def launch(self, buffer: torch.Tensor, ready: Mark | None) -> None:
        """Start on `buffer`, which must not change until `wait` has returned. Collective over the group."""
        ...

    def start_last_stage(self) -> None:
        """Start what can only start when the first collective has landed. Collective over the group, in plan order."""
        ...

    def wait(self) -> torch.Tensor:
        """Wait for everything that was launched; return this rank's averages, flat, in the accumulation dtype."""
        ...

    @property
    def times(self) -> list[CollectiveTimes]:
        """The collectives of the last step."""
        ...


def exchange_for(
    plan: BucketPlan, arithmetic: ReductionArithmetic, clock: Clock, pool: BufferPool, *, gives_back: bool = False
) -> Exchange:
    """Return the way in which the bucket of `plan` is averaged."""
    group = plan.group
    if group.handle is None:
        return NoExchange(plan, arithmetic)
    if plan.sharded:
        return ReduceScatter(plan, arithmetic, clock, pool, gives_back=gives_back)
    # A sum of two is rounded once, wherever it is made: only longer ones lose by a narrow wire.
    if arithmetic.wire_dtype.itemsize < arithmetic.accumulation_dtype.itemsize and group.size > 2:
        return ReduceScatterAllGather(plan, arithmetic, clock, pool)
    return AllReduce(plan, arithmetic, clock)


class NoExchange:
    """One rank: its contribution is the sum."""

    def __init__(self, plan: BucketPlan, arithmetic: ReductionArithmetic) -> None:
        self.factor_before, self._factor_after = arithmetic.factors(plan.group, backend_averages=False)
        self.times: list[CollectiveTimes] = []
        self._buffer: torch.Tensor | None = None

    def begin_step(self) -> None:
        """Nothing to forget."""

    def launch(self, buffer: torch.Tensor, ready: Mark | None) -> None:
        """Keep the buffer."""
        self._buffer = buffer

    def start_last_stage(self) -> None:
        """Nothing to start."""

    def wait(self) -> torch.Tensor:
        """Return the buffer."""
        assert self._buffer is not None
        return scaled(self._buffer, self._factor_after)


class AllReduce:
    """Every rank gets all averages, in the buffer it gave."""

    def __init__(self, plan: BucketPlan, arithmetic: ReductionArithmetic, clock: Clock) -> None:
        self._plan, self._arithmetic, self._clock = plan, arithmetic, clock
        self.factor_before, self._factor_after = arithmetic.factors(plan.group, backend_averages=True)
        self._buffer: torch.Tensor | None = None
        self._wire: torch.Tensor | None = None
        self._collective: Collective | None = None

    def begin_step(self) -> None:
        """Forget the last step."""
        self._buffer = self._collective = None

    def launch(self, buffer: torch.Tensor, ready: Mark | None) -> None:
        """Start the all-reduce, on the buffer itself where its dtype is the wire's."""
        group, arithmetic = self._plan.group, self._arithmetic
        self._buffer, self._wire = buffer, buffer.to(arithmetic.wire_dtype)
        wire, operation = self._wire, arithmetic.operation(group)
        self._collective = Collective(
            lambda: dist.all_reduce(wire, op=operation, group=group.handle, async_op=True),
            self._clock,
            bucket=self._plan.index,
            kind="all_reduce",
            bytes_sent=all_reduce_bytes_sent(wire.nbytes, group.size),
            ready=ready,
        )

    def start_last_stage(self) -> None:
        """Nothing to start."""

    def wait(self) -> torch.Tensor:
        """Return the buffer, now full of averages."""
        assert self._buffer is not None and self._collective is not None
        self._collective.wait()
        if self._wire is not None and self._wire is not self._buffer:
            self._buffer.copy_(self._wire)
        self._wire = None
        return scaled(self._buffer, self._factor_after)

    @property
    def times(self) -> list[CollectiveTimes]:
        """The one collective of the last step."""
        return [] if self._collective is None else [self._collective.times]
