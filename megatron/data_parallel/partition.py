"""Which group reduces a gradient, and which bucket it travels in.

The first station of a gradient's journey: partition -> grad_reducer (hooks, readiness, order) -> grad_bucket (buffer,
launch, wait). A plan is made once, before the first step, from the order in which gradients really become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

# Every gradient and, where they are gathered, every parameter starts on a 16-byte boundary of its buffer in any dtype
# of 2 bytes or more, so that vectorised kernels may read it. Nearly all parameters need no padding for it.
_ALIGNMENT_ELEMENTS = 8


@dataclass(frozen=True)
class ReductionGroup:
    """The ranks over which a gradient is averaged, and what its sum is divided by.

    `divisor` is the size of the full data-parallel group. It differs from `size` for expert parameters only: their
    gradient is summed over the expert-data-parallel group but still averaged over every data rank; and for gradients of
    which each rank of a larger group has only a term. `rank` is this rank's place in the group, `handle` is None when
    there is nobody to reduce with.

    A group that `spans_stages` is reduced once a step only: a stage that waited for it after each micro-batch would
    wait for a stage that waits for this one.
    """

    name: str
    size: int
    divisor: int
    rank: int = field(default=0, compare=False)
    handle: dist.ProcessGroup | None = field(default=None, compare=False)
    spans_stages: bool = False


@dataclass(frozen=True)
class GradientSlot:
    """One parameter's place in a bucket: `numel` elements of shape `shape`, from element `offset` on.

    `stride` is the parameter's own where that fills memory without gaps, as a transposed one does: optimizer kernels
    walk parameter and gradient side by side in memory order.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim parameter, 0 for an empty one."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class BucketPlan:
    """Consecutive gradients of one group and one parameter dtype, which share a buffer and a collective.

    A sharded bucket is split into as many equal shards as its group has ranks, whatever parameter an element belongs
    to: each rank gets the reduced gradients of its shard and updates the parameters there.
    """

    index: int
    group: ReductionGroup
    parameter_dtype: str
    slots: tuple[GradientSlot, ...]
    num_elements: int
    sharded: bool = False

    @property
    def summary(self) -> str:
        """What all ranks of its group have in common, as text; names and places in the plan differ between stages."""
        return (
            f"group {self.group.name} of {self.group.size} ranks, divisor {self.group.divisor}, "
            f"{self.parameter_dtype}, {self.num_elements} elements{' in shards' if self.sharded else ''}"
        )

    @property
    def shard(self) -> range:
        """This rank's elements of the buffer; all of them when the bucket is not sharded."""
        if not self.sharded:
            return range(self.num_elements)
        shard_elements = self.num_elements // self.group.size
        return range(self.group.rank * shard_elements, (self.group.rank + 1) * shard_elements)

    def run(self, slot: GradientSlot) -> range:
        """The elements of a parameter, counted in memory order, that lie in this rank's shard; may be empty."""
        start = max(self.shard.start - slot.offset, 0)
        return range(start, max(start, min(self.shard.stop - slot.offset, slot.numel)))


@dataclass(frozen=True)
class ReductionPlan:
    """All buckets of a rank in launch order. Equal on all ranks of a stage, which `agreement` checks."""

    buckets: tuple[BucketPlan, ...]

    def lines(self) -> list[str]:
        """The plan as text, a line a bucket and a line a gradient, for comparing and for reading."""
        return [
            line
            for bucket in self.buckets
            for line in (
                f"bucket {bucket.index}: {bucket.summary}",
                *(
                    f"{slot.name} {list(slot.shape)} stride {list(slot.stride)} at {slot.offset}"
                    for slot in bucket.slots
                ),
            )
        ]

    def lines_between_stages(self) -> list[str]:
        """What ranks of other stages must have planned as well, as text."""
        return [bucket.summary for bucket in self.buckets if bucket.group.spans_stages]


def plan_buckets(
    ready_order: Sequence[str],
    parameters: Mapping[str, torch.nn.Parameter],
    group_of: Callable[[str], ReductionGroup],
    *,
    bucket_elements: int,
    sharded: bool = False,
) -> ReductionPlan:
    """Fill buckets with gradients in the order in which backward finishes them.

    A bucket closes when it holds `bucket_elements` or more, so a parameter is never split. Two gradients travel alone:
    one that fills a bucket by itself, and the last to be ready. Nobody waits for the first, and the second is the part
    of the reduction that nothing can hide (in a decoder it is the input embedding, which is both).

    Groups and dtypes fill their own buckets side by side; buckets are launched in the order in which their last
    gradient is ready. With `sharded` every bucket whose group has several ranks is split between them.
    """
    open_buckets: dict[tuple[ReductionGroup, torch.dtype], _BucketFiller] = {}
    closed: list[_BucketFiller] = []
    for position, name in enumerate(ready_order):
        parameter = parameters[name]
        key = (group_of(name), parameter.dtype)
        alone = parameter.numel() >= bucket_elements or position == len(ready_order) - 1
        if alone and key in open_buckets:
            closed.append(open_buckets.pop(key))
        filler = open_buckets.setdefault(key, _BucketFiller(*key))
        filler.add(name, parameter, position)
        if filler.num_elements >= bucket_elements:
            closed.append(open_buckets.pop(key))
    closed.extend(open_buckets.values())
    closed.sort(key=lambda filler: filler.last_position)
    return ReductionPlan(tuple(filler.to_plan(index, sharded=sharded) for index, filler in enumerate(closed)))


class _BucketFiller:
    """A bucket that is still taking parameters."""

    def __init__(self, group: ReductionGroup, dtype: torch.dtype) -> None:
        self.group = group
        self.dtype = dtype
        self.slots: list[GradientSlot] = []
        self.num_elements = 0
        self.last_position = -1

    def add(self, name: str, parameter: torch.nn.Parameter, position: int) -> None:
        stride = torch.empty_like(parameter, device="meta").stride()
        self.slots.append(GradientSlot(name, tuple(parameter.shape), stride, self.num_elements))
        self.num_elements += _round_up(parameter.numel(), _ALIGNMENT_ELEMENTS)
        self.last_position = position

    def to_plan(self, index: int, *, sharded: bool) -> BucketPlan:
        sharded = sharded and self.group.size > 1
        num_elements = _round_up(self.num_elements, self.group.size * _ALIGNMENT_ELEMENTS if sharded else 1)
        return BucketPlan(index, self.group, str(self.dtype), tuple(self.slots), num_elements, sharded)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
