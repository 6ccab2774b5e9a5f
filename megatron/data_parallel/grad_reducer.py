"""Hooks, readiness and order: when each bucket of gradients is launched.

A step goes `begin_step`, a `backward_pass` for each micro-batch, `finish`. With `overlap` the hooks of the last
backward launch each bucket as soon as it and all buckets before it are ready; without it `finish` launches them.
Nothing else differs: buckets, order, collectives and arithmetic are those of the plan, so the two are bit for bit the
same.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from megatron.data_parallel.exposure import BucketTimes, clock_for
from megatron.data_parallel.grad_bucket import GradBucket, ReductionArithmetic
from megatron.data_parallel.partition import ReductionPlan
from megatron.errors import DivergenceError

_log = logging.getLogger(__name__)


class _Phase(enum.Enum):
    IDLE = "no step is open"
    OPEN = "a step waits for its next backward"
    ACCUMULATING = "a backward before the last of the step runs"
    BOUNDARY = "the last backward of the step runs"
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
        check_for_nan: bool = False,
    ) -> None:
        self._parameters = dict(parameters)
        self._overlap = overlap
        self._check_for_nan = check_for_nan
        self._phase = _Phase.IDLE
        self._buckets: list[GradBucket] = []
        for bucket_plan in plan.buckets:
            members = [self._parameters[slot.name] for slot in bucket_plan.slots]
            unshared = bucket_plan.group.handle is None and bucket_plan.group.divisor == 1
            if unshared and members[0].dtype == arithmetic.accumulation_dtype:
                continue
            clock = clock_for(members[0].device)
            self._buckets.append(GradBucket(bucket_plan, self._parameters, arithmetic, clock))
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.views}
        self._pending: dict[int, set[str]] = {}
        self._next_to_launch = 0
        self._named_as_missing: set[str] = set()
        self._trained = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._hooks = [
            self._parameters[name].register_post_accumulate_grad_hook(lambda _, name=name: self._on_gradient(name))
            for name in self._bucket_of
        ]

    # The life of a step

    def begin_step(self) -> None:
        """Open a step. Gradients left by anything that ran in between are dropped."""
        if self._in_step:
            raise RuntimeError(f"begin_step() while {self._phase.value}: the step before was never finished")
        self._check_trained()
        for parameter in self._parameters.values():
            parameter.grad = None
        for bucket in self._buckets:
            bucket.begin_step()
        self._pending = {bucket.plan.index: set(bucket.views) for bucket in self._buckets}
        self._next_to_launch = 0
        self._phase = _Phase.OPEN

    @contextmanager
    def backward_pass(self, *, is_boundary: bool) -> Iterator[None]:
        """Take the gradients of the backward that runs inside; those of the boundary, the last of the step, are final.

        A backward that runs outside belongs to somebody else and counts as nothing.
        """
        self._expect(_Phase.OPEN, "backward_pass()")
        self._phase = _Phase.BOUNDARY if is_boundary else _Phase.ACCUMULATING
        yield
        self._phase = _Phase.COMPLETE if is_boundary else _Phase.OPEN

    def finish(self) -> None:
        """Launch what no hook launched, wait for everything, and leave each averaged gradient in its place.

        Collective over all groups of the plan. A second call in the same step does nothing.
        """
        if self._phase is _Phase.REDUCED:
            return
        self._expect(_Phase.COMPLETE, "finish()")
        self._name_missing()
        self._launch_up_to(len(self._buckets))
        for bucket in self._buckets:
            bucket.wait()
        for name, bucket in self._bucket_of.items():
            parameter, view = self._parameters[name], bucket.views[name]
            if parameter.dtype == view.dtype:
                parameter.grad = view
        self._phase = _Phase.REDUCED

    def abort(self) -> None:
        """End a step that failed, so that the process can go on and no rank waits for this one.

        Every bucket is launched on every rank in every step, so the ones still to come are launched here too, filled
        with NaN: no rank will take the step. Errors of the collectives are logged; the caller raises the original one.
        """
        if not self._in_step:
            return
        self._phase = _Phase.IDLE
        try:
            for bucket in self._buckets:
                if not bucket.launched:
                    bucket.spoil()
                    bucket.launch()
            for bucket in self._buckets:
                bucket.wait()
        except RuntimeError as error:
            _log.warning("gradient reductions in flight could not be completed after a failed step: %s", error)
        for parameter in self._parameters.values():
            parameter.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return each trained parameter's averaged gradient, in the accumulation dtype, of the parameter's shape.

        What user code wrote into `.grad`, or put in its place, since `finish` is what counts; None counts as zero.
        """
        self._expect(_Phase.REDUCED, "gradients()")
        return {name: self._gradient(name) for name in self._trained_in_order()}

    def release(self) -> None:
        """Close the step: the gradients have been used."""
        self._expect(_Phase.REDUCED, "release()")
        self._phase = _Phase.IDLE

    def close(self) -> None:
        """Remove the hooks; the parameters are ordinary ones again."""
        for hook in self._hooks:
            hook.remove()

    @property
    def bucket_times(self) -> Sequence[BucketTimes]:
        """When the buckets of the last step were ready, launched and landed, in launch order."""
        return [bucket.times for bucket in self._buckets]

    # What the hooks do

    def _on_gradient(self, name: str) -> None:
        if self._phase not in (_Phase.ACCUMULATING, _Phase.BOUNDARY):
            return
        bucket = self._bucket_of[name]
        if bucket.launched:
            raise RuntimeError(
                f"the gradient of {name} changed after its bucket {bucket.plan.index} was launched: something ran "
                "a second backward over the same graph, and the sum that is under way would be wrong"
            )
        bucket.absorb(name)
        if self._phase is _Phase.BOUNDARY:
            self._settle(bucket, name)

    def _settle(self, bucket: GradBucket, name: str) -> None:
        """Note that `name` is final; when its bucket has become ready, launch what may be launched."""
        pending = self._pending[bucket.plan.index]
        if name not in pending:
            return
        pending.remove(name)
        if pending:
            return
        bucket.mark_ready()
        if self._overlap:
            self._launch_ready()

    def _launch_ready(self) -> None:
        """Launch, in plan order, up to the first bucket that still waits for a gradient."""
        upto = self._next_to_launch
        while upto < len(self._buckets) and not self._pending[self._buckets[upto].plan.index]:
            upto += 1
        self._launch_up_to(upto)

    def _launch_up_to(self, end: int) -> None:
        while self._next_to_launch < end:
            bucket = self._buckets[self._next_to_launch]
            if self._check_for_nan:
                self._refuse_nonfinite(bucket)
            self._next_to_launch += 1
            bucket.launch()

    # Checks

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

    # Where gradients are

    def _trained_in_order(self) -> list[str]:
        return [name for name in self._parameters if name in self._trained]

    def _gradient(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        bucket = self._bucket_of.get(name)
        if bucket is None:
            return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        view = bucket.views[name]
        if parameter.dtype == view.dtype and parameter.grad is not view:
            view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
        return view
