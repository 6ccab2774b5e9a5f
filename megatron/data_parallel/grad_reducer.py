"""Hooks, readiness and order: when each bucket of gradients is launched.

A step goes `begin_step`, a `backward_pass` for each micro-batch, `finish`. With `overlap` the hooks of the last
backward launch each bucket as soon as it and all buckets before it are ready; without it `finish` launches them.
Nothing else differs: buckets, order, collectives and arithmetic are those of the plan, so the two are bit for bit the
same. With `delayed` they are left to `finish` all the same: a pipeline stage that has nothing to do by then gives way
to stages that others wait for. With `scatter_every_backward` sharded buckets are launched in every backward, so that no
rank keeps whole gradients.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.data_parallel.buffer_pool import BufferPool
from megatron.data_parallel.exposure import CollectiveTimes, clock_for
from megatron.data_parallel.grad_bucket import GradBucket
from megatron.data_parallel.launch_queue import LaunchQueue
from megatron.data_parallel.partition import BucketPlan, ReductionPlan
from megatron.data_parallel.roll_call import Progress, RollCall
from megatron.errors import DivergenceError, LostRankError

_log = logging.getLogger(__name__)


class _Phase(enum.Enum):
    IDLE = "no step is open"
    OPEN = "a step waits for its next backward"
    BACKWARD = "a backward of the step runs"
    COMPLETE = "the last backward of the step has ended"
    REDUCED = "the averaged gradients are in place"


class GradReducer:
    """Owns every gradient from backward to the optimizer.

    A parameter that nobody shares (one data rank, accumulated in its own dtype) is left alone: it has no bucket, no
    hook and no copy, and its gradient is its `.grad`.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        plan: ReductionPlan,
        *,
        arithmetic: ReductionArithmetic,
        overlap: bool,
        delayed: bool = False,
        scatter_every_backward: bool = False,
        check_for_nan: bool = False,
        roll_call: RollCall | None = None,
    ) -> None:
        self.overlap = overlap
        self.delayed = delayed
        self._parameters = dict(parameters)
        self._keeps_shards_only = scatter_every_backward
        self._check_for_nan = check_for_nan
        self._roll_call = roll_call
        self._phase = _Phase.IDLE
        self._device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        self._pool = BufferPool(self._device)
        self._buckets = self._make_buckets(plan, arithmetic, scatter_every_backward)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.parameters}
        self._passes_left = 0
        self._queue = LaunchQueue(())
        self._progress = Progress(0, 0)
        self._named_as_missing: set[str] = set()
        self._trained = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._hooks = [
            self._parameters[name].register_post_accumulate_grad_hook(lambda _, name=name: self._on_gradient(name))
            for name in self._bucket_of
        ]

    def _make_buckets(
        self, plan: ReductionPlan, arithmetic: ReductionArithmetic, scatter_every_backward: bool
    ) -> list[GradBucket]:
        if not plan.buckets:
            return []
        clock = clock_for(self._device)
        return [
            GradBucket(
                bucket,
                self._parameters,
                arithmetic,
                clock,
                self._pool,
                transient_buffer=scatter_every_backward and bucket.sharded and not bucket.group.spans_stages,
            )
            for bucket in plan.buckets
            if not self._is_left_alone(bucket, arithmetic)
        ]

    def _is_left_alone(self, bucket: BucketPlan, arithmetic: ReductionArithmetic) -> bool:
        parameter = self._parameters[bucket.slots[0].name]
        unshared = bucket.group.handle is None and bucket.group.divisor == 1
        return unshared and parameter.dtype == arithmetic.accumulation_dtype

    # The life of a step

    def begin_step(self, num_backward_passes: int) -> None:
        """Open a step of so many backward passes. Gradients left by anything that ran in between are dropped."""
        self.refuse_in_step("begin_step()")
        self._check_trained()
        for parameter in self._parameters.values():
            parameter.grad = None
        for bucket in self._buckets:
            bucket.begin_step()
        self._passes_left = num_backward_passes
        self._queue = LaunchQueue(())
        self._progress = Progress(self._progress.num_steps + 1, 0)
        self._phase = _Phase.OPEN

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Take the gradients of the backward that runs inside. Those of the last pass of the step are final.

        A backward that runs outside belongs to somebody else and counts as nothing: what it left is dropped.
        """
        self._expect(_Phase.OPEN, "backward_pass()")
        for name in self._bucket_of:
            self._parameters[name].grad = None
        self._open_launches()
        self._phase = _Phase.BACKWARD
        yield
        if not self._passes_left:
            self._phase = _Phase.COMPLETE
            return
        self._launch_all()
        if not self.overlap:
            for bucket in self._queue.buckets:
                with self._explained(bucket):
                    bucket.wait()
        self._phase = _Phase.OPEN

    def finish(self) -> None:
        """Launch what no hook launched, wait for everything, and leave each averaged gradient in its place.

        Collective over all groups of the plan. A second call in the same step does nothing.
        """
        if self._phase is _Phase.REDUCED:
            return
        self._expect(_Phase.COMPLETE, "finish()")
        self._name_missing()
        self._launch_all()
        self._wait_for_all()
        for bucket in self._buckets:
            for name, average in bucket.averages.items():
                parameter = self._parameters[name]
                if parameter.dtype == average.dtype and not bucket.plan.sharded:
                    parameter.grad = average
        if self._keeps_shards_only:
            self._pool.clear()
        self._phase = _Phase.REDUCED

    def abort(self) -> bool:
        """End a step that failed, so that the process can go on and no rank waits for this one; False if none is open.

        Every bucket is launched on every rank as often in every step, so the launches still to come are made here too,
        filled with NaN: no rank will take the step. Errors of the collectives are logged; the caller raises the
        original one.
        """
        if not self._in_step:
            return False
        self._phase = _Phase.IDLE
        try:
            self._launch_spoiled()
            while self._passes_left:
                self._open_launches()
                self._launch_spoiled()
            self._wait_for_all()
        except (RuntimeError, LostRankError) as error:
            _log.warning("gradient reductions in flight could not be completed after a failed step: %s", error)
        for parameter in self._parameters.values():
            parameter.grad = None
        return True

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return each trained parameter's averaged gradient, in the accumulation dtype, of the parameter's shape.

        What user code wrote into `.grad`, or put in its place, since `finish` is what counts; None counts as zero. Of a
        parameter in a sharded bucket it is the flat run of elements that this rank updates; one without a run here is
        left out.
        """
        self._expect(_Phase.REDUCED, "gradients()")
        gradients = {name: self._gradient(name) for name in self._parameters if name in self._trained}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def release(self) -> None:
        """Close the step: the gradients have been used."""
        self._expect(_Phase.REDUCED, "release()")
        self._phase = _Phase.IDLE

    def close(self) -> None:
        """Remove the hooks; the parameters are ordinary ones again. Refused while a step is open."""
        self.refuse_in_step("close()")
        for hook in self._hooks:
            hook.remove()

    def refuse_in_step(self, call: str) -> None:
        """Raise RuntimeError, naming `call`, while a step is open: gradients are on their way."""
        if self._in_step:
            raise RuntimeError(f"{call} while {self._phase.value}: the step was never finished")

    @property
    def collectives(self) -> list[CollectiveTimes]:
        """When the collectives of the last step were launched and landed, by bucket."""
        return [times for bucket in self._buckets for times in bucket.times]

    # What the hooks do

    def _on_gradient(self, name: str) -> None:
        if self._phase is not _Phase.BACKWARD:
            return
        bucket = self._bucket_of[name]
        if bucket.launched:
            raise RuntimeError(
                f"the gradient of {name} changed after its bucket {bucket.plan.index} was launched: something ran "
                "a second backward over the same graph, and the sum that is under way would be wrong"
            )
        bucket.absorb(name)
        self._queue.settle(bucket, name)
        if self._launches_from_hooks:
            while (ready := self._queue.next_if_ready) is not None:
                self._launch(ready)

    # Launching

    @property
    def _launches_from_hooks(self) -> bool:
        return self.overlap and (self._passes_left > 0 or not self.delayed)

    def _open_launches(self) -> None:
        """Begin the next backward: which buckets it launches, all of them in the last."""
        self._passes_left -= 1
        buckets = [bucket for bucket in self._buckets if bucket.transient_buffer or not self._passes_left]
        self._queue = LaunchQueue(buckets)
        for bucket in buckets:
            if bucket.transient_buffer:
                if bucket.launched:  # by the backward before; a bucket's memory is in flight once at most
                    with self._explained(bucket):
                        bucket.wait()
                bucket.begin_launch()

    def _launch_all(self) -> None:
        """Launch what no hook has launched, in plan order."""
        while (bucket := self._queue.next) is not None:
            self._launch(bucket)

    def _launch(self, bucket: GradBucket) -> None:
        if self._check_for_nan:
            self._refuse_nonfinite(bucket)
        self._queue.advance()
        with self._explained(bucket):
            bucket.launch()
        self._progress = replace(self._progress, num_launches=self._progress.num_launches + 1)

    def _launch_spoiled(self) -> None:
        while (bucket := self._queue.next) is not None:
            bucket.spoil()
            self._queue.advance()
            bucket.launch()

    def _wait_for_all(self) -> None:
        """Wait for every bucket: backends complete collectives out of order."""
        for bucket in self._buckets:
            with self._explained(bucket):
                bucket.start_last_stage()
        for bucket in self._buckets:
            with self._explained(bucket):
                bucket.wait()

    # Checks

    @contextmanager
    def _explained(self, bucket: GradBucket) -> Iterator[None]:
        """Turn the failure of a collective into a LostRankError that names bucket, parameters and missing ranks."""
        try:
            yield
        except RuntimeError as error:
            handle = bucket.plan.group.handle
            if handle is None:
                raise
            names = list(bucket.parameters)
            raise self.lost_rank(
                f"gradient bucket {bucket.plan.index} of group {bucket.plan.group.name} "
                f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}) was not reduced",
                torch.distributed.get_process_group_ranks(handle),
                error,
            ) from error

    def lost_rank(self, what: str, ranks: Sequence[int], error: RuntimeError) -> Exception:
        """Return what to raise for the `error` of a collective: one that names the `ranks` that did not come so far.

        To be called by every rank that meets the failure; it asks the others.
        """
        if self._roll_call is None:
            return error
        missing = self._roll_call.absent(ranks, self._progress)
        reason = str(error).splitlines()[0]
        return LostRankError(f"rank {torch.distributed.get_rank()}: {what}: {missing} ({reason})")

    @property
    def _in_step(self) -> bool:
        return self._phase not in (_Phase.IDLE, _Phase.REDUCED)

    def _expect(self, phase: _Phase, call: str) -> None:
        if self._phase is not phase:
            raise RuntimeError(f"{call} while {self._phase.value}")

    def _check_trained(self) -> None:
        changed = [name for name, p in self._parameters.items() if p.requires_grad != (name in self._trained)]
        if changed:
            raise RuntimeError(
                f"requires_grad of {', '.join(changed)} changed after the gradient buckets were planned; freeze or "
                "unfreeze parameters before training starts"
            )

    def _name_missing(self) -> None:
        missing = [name for bucket in self._buckets for name in bucket.missing if name not in self._named_as_missing]
        if missing:
            self._named_as_missing.update(missing)
            _log.warning("no gradient on this rank in this step for %s: it contributes zeros", ", ".join(missing))

    def _refuse_nonfinite(self, bucket: GradBucket) -> None:
        names = bucket.nonfinite()
        if names:
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            raise DivergenceError(
                f"rank {rank}: the gradient of {', '.join(names)} in bucket {bucket.plan.index} is not finite, found "
                "before it was reduced (check_for_nan_in_grad)"
            )

    def _gradient(self, name: str) -> torch.Tensor | None:
        parameter = self._parameters[name]
        bucket = self._bucket_of.get(name)
        if bucket is None:
            return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        average = bucket.averages.get(name)
        if bucket.plan.sharded or average is None:
            return average
        if parameter.dtype == average.dtype and parameter.grad is not average:
            average.zero_() if parameter.grad is None else average.copy_(parameter.grad)
        return average
