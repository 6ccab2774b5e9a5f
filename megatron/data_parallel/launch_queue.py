"""The launches that one backward makes: which buckets, in which order, and what each still waits for."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.data_parallel.grad_bucket import GradBucket


class LaunchQueue:
    """Buckets in plan order. A bucket that is ready waits for those before it, so that all ranks launch alike."""

    def __init__(self, buckets: Sequence[GradBucket]) -> None:
        self.buckets = tuple(buckets)
        self._num_launched = 0
        self._pending = {bucket.plan.index: set(bucket.parameters) for bucket in buckets}

    def settle(self, bucket: GradBucket, name: str) -> None:
        """Note that the gradient of `name` is final in this backward, if it is one that a launch waits for."""
        pending = self._pending.get(bucket.plan.index, set())
        if name in pending:
            pending.remove(name)
            if not pending:
                bucket.mark_ready()

    @property
    def next(self) -> GradBucket | None:
        """The bucket whose turn it is, None after the last."""
        return self.buckets[self._num_launched] if self._num_launched < len(self.buckets) else None

    @property
    def next_if_ready(self) -> GradBucket | None:
        """The bucket whose turn it is, None while it still waits for a gradient."""
        bucket = self.next
        return None if bucket is None or self._pending[bucket.plan.index] else bucket

    def advance(self) -> None:
        """Take it that the bucket whose turn it was has been launched."""
        self._num_launched += 1
