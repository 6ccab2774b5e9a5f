"""One collective in flight: its work, what it sends, and the marks that say how long it took."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from megatron.data_parallel.exposure import Clock, CollectiveKind, CollectiveTimes, Mark

# torch 2.13 renames these two and warns of the names that are all that older versions have.
all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Collective:
    """Starts a collective, returns at once, and can be waited for.

    `start` calls torch.distributed with `async_op=True`. Tensors that it refers to stay alive until `wait` has
    returned: backends let go of theirs at the first wait of any stream, and the clock's comes right after the launch.
    """

    def __init__(
        self,
        start: Callable[[], dist.Work],
        clock: Clock,
        *,
        bucket: int,
        kind: CollectiveKind,
        bytes_sent: int,
        ready: Mark | None = None,
    ) -> None:
        self._clock = clock
        self._keeps_alive: Callable[[], dist.Work] | None = start
        launched = clock.mark()
        self._work: dist.Work | None = start()
        self.times = CollectiveTimes(bucket, kind, bytes_sent, launched, clock.mark_landing(self._work), ready)
        self.times.blocked.append((launched, clock.mark()))

    def wait(self) -> None:
        """Wait until the collective has completed, on the host or on the current stream. A second call does nothing."""
        if self._work is None:
            return
        started = self._clock.mark()
        self._work.wait()
        ended = self._clock.mark()
        self._work = self._keeps_alive = None
        self.times.blocked.append((started, ended))
        self.times.landed.no_later_than(ended)


def all_reduce_bytes_sent(payload_bytes: int, group_size: int) -> int:
    """Bytes one rank sends in a ring all-reduce: 2 (p-1)/p of the payload (Patarasuk and Yuan, 2009)."""
    return 2 * (group_size - 1) * payload_bytes // group_size


def shards_bytes_sent(payload_bytes: int, group_size: int) -> int:
    """Bytes one rank sends in a reduce-scatter or an all-gather of a payload: (p-1)/p of it."""
    return (group_size - 1) * payload_bytes // group_size
