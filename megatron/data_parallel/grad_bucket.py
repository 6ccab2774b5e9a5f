"""One bucket: the buffer its gradients share, the launch of its collective, and the wait for it.

The last station of a gradient's journey before the optimizer. A bucket knows nothing of hooks, order or other buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.data_parallel.exposure import BucketTimes, Clock, all_reduce_bytes_sent
from megatron.data_parallel.partition import BucketPlan, ReductionGroup


@dataclass(frozen=True)
class ReductionArithmetic:
    """How a sum over ranks becomes an average, and in which dtype it travels.

    Gradients are accumulated in `accumulation_dtype`, and the collective sends `wire_dtype`. With `prescale` the
    division rides on the accumulation, which costs nothing; without it gradients are divided by `predivide_factor`
    before and by the rest after the collective. With `average_in_collective` the backend divides.
    """

    accumulation_dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype = torch.float32
    prescale: bool = True
    predivide_factor: float = 1.0
    average_in_collective: bool = False

    def factors(self, group: ReductionGroup) -> tuple[float, float]:
        """Factors to multiply a gradient by before and after the collective; their product makes the average."""
        if self.average_in_collective and group.size > 1:
            return 1.0, group.size / group.divisor
        if self.prescale:
            return 1.0 / group.divisor, 1.0
        return 1.0 / self.predivide_factor, self.predivide_factor / group.divisor

    def operation(self, group: ReductionGroup) -> dist.ReduceOp.RedOpType:
        """What the backend does with the contributions. A group of one is never asked to average."""
        return dist.ReduceOp.AVG if self.average_in_collective and group.size > 1 else dist.ReduceOp.SUM


class GradBucket:
    """The gradients of one bucket: a flat buffer, a view of it for each parameter, at most one collective in flight."""

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, torch.nn.Parameter],
        arithmetic: ReductionArithmetic,
        clock: Clock,
    ) -> None:
        self.plan = plan
        self.parameters = {slot.name: parameters[slot.name] for slot in plan.slots}
        device = next(iter(self.parameters.values())).device
        self._buffer = torch.zeros(plan.num_elements, dtype=arithmetic.accumulation_dtype, device=device)
        self.views = {slot.name: self._buffer.as_strided(slot.shape, slot.stride, slot.offset) for slot in plan.slots}
        self._arithmetic = arithmetic
        self._clock = clock
        self._factor_before, self._factor_after = arithmetic.factors(plan.group)
        self._written: set[str] = set()
        self._producers = _Producers(device)
        self._wire: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self.launched = False
        self.times = BucketTimes(plan.index, 0)

    def begin_step(self) -> None:
        """Forget the gradients of the last step. What is not written again before the launch counts as zero."""
        assert self._work is None, f"bucket {self.plan.index} is still in flight"
        self._written.clear()
        self.launched = False
        self.times = BucketTimes(self.plan.index, 0)

    def absorb(self, name: str) -> None:
        """Move what backward left in the parameter's `.grad` into the buffer, adding to earlier micro-batches."""
        parameter = self.parameters[name]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if gradient.is_sparse:
            raise RuntimeError(f"the gradient of {name} is sparse; overlap_grad_reduce reduces dense gradients only")
        view = self.views[name]
        with torch.no_grad():
            if name in self._written:
                view.add_(gradient, alpha=self._factor_before)
            else:
                torch.mul(gradient, self._factor_before, out=view)
                self._written.add(name)
        self._producers.note_write()

    @property
    def missing(self) -> list[str]:
        """Names of the parameters that have no gradient yet in this step."""
        return [name for name in self.views if name not in self._written]

    def spoil(self) -> None:
        """Make every gradient of the bucket NaN, so that no rank can take a step with what was left unfinished."""
        self._buffer.fill_(float("nan"))
        self._written.update(self.views)

    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradient here has a NaN or an infinity. Synchronises with the device."""
        if bool(torch.isfinite(self._buffer.sum())):
            return []
        return [name for name, view in self.views.items() if not bool(torch.isfinite(view).all())]

    def mark_ready(self) -> None:
        """Note the moment at which the last of its gradients became final."""
        self.times.ready = self._clock.mark()

    def launch(self) -> None:
        """Start the collective and return at once. Collective over the bucket's group, in plan order."""
        self.launched = True
        for name in self.missing:
            self.views[name].zero_()
        group = self.plan.group
        if group.handle is None:
            return
        self._producers.make_current_stream_wait()
        started = self._clock.mark()
        self._wire = self._buffer.to(self._arithmetic.wire_dtype)
        self._work = dist.all_reduce(
            self._wire, op=self._arithmetic.operation(group), group=group.handle, async_op=True
        )
        self.times.launched = started
        self.times.bytes_sent = all_reduce_bytes_sent(self._wire.nbytes, group.size)
        self.times.landed = self._clock.mark_landing(self._work)
        self.times.blocked.append((started, self._clock.mark()))

    def wait(self) -> None:
        """Wait until the collective has completed, on the host or on the current stream, and finish the average."""
        assert self.launched, f"bucket {self.plan.index} was never launched"
        if self._work is not None:
            started = self._clock.mark()
            self._work.wait()
            ended = self._clock.mark()
            self.times.blocked.append((started, ended))
            assert self.times.landed is not None
            self.times.landed.no_later_than(ended)
            if self._wire is not self._buffer and self._wire is not None:
                self._buffer.copy_(self._wire)
            self._work = self._wire = None
        if self._factor_after != 1.0:
            self._buffer.mul_(self._factor_after)


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
