"""One bucket: the buffer its gradients share, the launch of its collective, and the wait for it.

The last station of a gradient's journey before the optimizer. A bucket knows nothing of hooks, order or other buckets.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.data_parallel.buffer_pool import BufferPool
from megatron.data_parallel.exchange import exchange_for
from megatron.data_parallel.exposure import Clock, CollectiveTimes, Mark
from megatron.data_parallel.partition import BucketPlan


class GradBucket:
    """The gradients of one bucket: a flat buffer, a view of it for each parameter, and the exchange of its contents.

    With `transient_buffer` the bucket is launched after every backward, and only then is there a buffer: what stays is
    this rank's shard of the average.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, torch.nn.Parameter],
        arithmetic: ReductionArithmetic,
        clock: Clock,
        pool: BufferPool,
        *,
        transient_buffer: bool = False,
    ) -> None:
        self.plan = plan
        self.parameters = {slot.name: parameters[slot.name] for slot in plan.slots}
        self.transient_buffer = transient_buffer
        self._accumulation_dtype = arithmetic.accumulation_dtype
        self._clock = clock
        self._pool = pool
        self._exchange = exchange_for(plan, arithmetic, clock, pool, gives_back=transient_buffer)
        self._buffer: torch.Tensor | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._written: set[str] = set()
        self._producers = _Producers(next(iter(self.parameters.values())).device)
        self._ready: Mark | None = None
        self.launched = False
        self.averages: dict[str, torch.Tensor] = {}
        if not transient_buffer:
            self._take_buffer()

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        self._exchange.begin_step()
        self.averages = {}
        self.begin_launch()

    def begin_launch(self) -> None:
        """Gather gradients for another launch. What is not written again before it counts as zero."""
        self._written.clear()
        self._ready = None
        self.launched = False

    def absorb(self, name: str) -> None:
        """Move what backward left in the parameter's `.grad` into the buffer, adding to earlier micro-batches."""
        parameter = self.parameters[name]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if gradient.is_sparse:
            raise RuntimeError(f"the gradient of {name} is sparse; overlap_grad_reduce reduces dense gradients only")
        if self._buffer is None:
            self._take_buffer()
        view, factor = self._views[name], self._exchange.factor_before
        with torch.no_grad():
            if name in self._written:
                view.add_(gradient, alpha=factor)
            else:
                torch.mul(gradient, factor, out=view)
                self._written.add(name)
        self._producers.note_write()

    @property
    def missing(self) -> list[str]:
        """Names of the parameters that have no gradient yet in this launch."""
        return [name for name in self.parameters if name not in self._written]

    def spoil(self) -> None:
        """Make every gradient of the bucket NaN, so that no rank can take a step with what was left unfinished."""
        if self._buffer is None:
            self._take_buffer()
        for view in self._views.values():
            view.fill_(float("nan"))
        self._written.update(self.parameters)

    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradient here has a NaN or an infinity. Synchronises with the device."""
        if self._buffer is None or bool(torch.isfinite(self._buffer.sum())):
            return []
        return [name for name in self._written if not bool(torch.isfinite(self._views[name]).all())]

    def mark_ready(self) -> None:
        """Note the moment at which the last of its gradients became final."""
        self._ready = self._clock.mark()

    def launch(self) -> None:
        """Start the exchange and return at once. Collective over the bucket's group, in plan order."""
        self.launched = True
        if self._buffer is None:
            self._take_buffer()
        assert self._buffer is not None
        for name in self.missing:
            self._views[name].zero_()
        self._producers.make_current_stream_wait()
        self._exchange.launch(self._buffer, self._ready)
        if self.transient_buffer:
            self._buffer, self._views = None, {}

    def start_last_stage(self) -> None:
        """Start what can only start when the first collective has landed. Collective over the group, in plan order."""
        self._exchange.start_last_stage()

    def wait(self) -> None:
        """Wait until the averages are there, on the host or for the current stream, and put them into `averages`.

        By name: the whole gradient in the parameter's shape, or of a sharded bucket the flat run that this rank has of
        it, where it has any.
        """
        assert self.launched, f"bucket {self.plan.index} was never launched"
        averages = self._exchange.wait()
        if not self.plan.sharded:
            self.averages = self._views
            return
        for slot in self.plan.slots:
            run = self.plan.run(slot)
            if run:
                start = slot.offset + run.start - self.plan.shard.start
                self.averages[slot.name] = averages[start : start + len(run)]

    @property
    def times(self) -> list[CollectiveTimes]:
        """The bucket's collectives of the last step, in order of launch."""
        return self._exchange.times

    def _take_buffer(self) -> None:
        self._buffer = self._pool.take(self.plan.num_elements, self._accumulation_dtype)
        self._views = {
            slot.name: self._buffer.as_strided(slot.shape, slot.stride, slot.offset) for slot in self.plan.slots
        }


class _Producers:
    """The streams that wrote into a bucket. Autograd may run hooks on several; a launch must wait for all of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_write: dict[int, torch.Event] = {}

    def note_write(self) -> None:
        if self._device.type == "cpu":
            return
        stream = torch.accelerator.current_stream(self._device)
        event = self._last_write.setdefault(stream.stream_id, torch.Event(self._device))
        event.record(stream)

    def make_current_stream_wait(self) -> None:
        if self._device.type == "cpu":
            return
        stream = torch.accelerator.current_stream(self._device)
        for event in self._last_write.values():
            stream.wait_event(event)
