"""What is reduced in this run, with whom and when: the table that every run begins with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.data_parallel.partition import BucketPlan, ReductionGroup, ReductionPlan
from megatron.mpu.grid import ParallelGrid


@dataclass(frozen=True)
class Row:
    """One line of the table, in words."""

    stage: str
    what: str
    ranks: str
    buckets: str
    sent: str
    wire: str
    when: str


_TITLES = Row("stage", "group", "ranks", "buckets", "MB in all", "on the wire", "when")


def reduction_table(
    plan: ReductionPlan, arithmetic: ReductionArithmetic, grid: ParallelGrid, *, overlap: bool, zero_stage: int
) -> str:
    """Return the table of all stages, on every rank. Collective over the pipe group.

    A line is a reduction group of a stage; `MB in all` are its gradients on the wire, however they are exchanged.
    """
    mine = [
        row
        for group in sorted({bucket.group for bucket in plan.buckets}, key=lambda group: group.name)
        for row in _rows_of(group, plan, arithmetic, grid.pipe.rank, overlap, zero_stage)
    ]
    rows: list[list[Row] | None] = [mine]
    if grid.pipe.handle is not None:
        rows = [None] * grid.pipe.size
        dist.all_gather_object(rows, mine, group=grid.pipe.handle)
    return _aligned([_TITLES, *(row for of_stage in rows for row in of_stage or [])])


def why_overlap_is_impossible(
    device_type: str, tensor_size: int, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return what in the environment keeps collectives from running beside kernels; None where nothing does."""
    if device_type == "cpu":
        return None
    if environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return "CUDA_LAUNCH_BLOCKING=1 makes every kernel wait for the one before"
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and tensor_size == 1:
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts kernels and collectives in one queue, which only tensor parallelism "
            "has a use for"
        )
    return None


def _rows_of(
    group: ReductionGroup,
    plan: ReductionPlan,
    arithmetic: ReductionArithmetic,
    stage: int,
    overlap: bool,
    zero_stage: int,
) -> list[Row]:
    buckets = [bucket for bucket in plan.buckets if bucket.group == group]
    num_elements = sum(bucket.num_elements for bucket in buckets)
    sharded = buckets[0].sharded
    rows = [
        Row(
            stage=str(stage),
            what=f"gradients, {group.name}",
            ranks=str(group.size),
            buckets=str(len(buckets)),
            sent=f"{num_elements * arithmetic.wire_dtype.itemsize / 1e6:.1f}",
            wire=f"{_name(arithmetic.wire_dtype)} {'reduce-scatter' if sharded else 'all-reduce'}",
            when=_when(group, overlap=overlap, every_backward=zero_stage == 2 and sharded and not group.spans_stages),
        )
    ]
    if sharded:
        rows.append(_gather_row(group, buckets, stage))
    if group.size == 1:
        return [Row(str(stage), f"gradients, {group.name}", "1", str(len(buckets)), "0.0", "nothing", "one rank")]
    return rows


def _gather_row(group: ReductionGroup, buckets: Sequence[BucketPlan], stage: int) -> Row:
    dtype: torch.dtype = getattr(torch, buckets[0].parameter_dtype.removeprefix("torch."))
    num_bytes = sum(bucket.num_elements for bucket in buckets) * dtype.itemsize
    return Row(
        stage=str(stage),
        what=f"parameters, {group.name}",
        ranks=str(group.size),
        buckets=str(len(buckets)),
        sent=f"{num_bytes / 1e6:.1f}",
        wire=f"{_name(dtype)} all-gather",
        when="after the update",
    )


def _when(group: ReductionGroup, *, overlap: bool, every_backward: bool) -> str:
    backward = "each backward" if every_backward else "the last backward"
    if not overlap:
        return f"after {backward}: overlap_grad_reduce is off"
    return f"under {backward}" + (", as its last bucket: both stages must have it" if group.spans_stages else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(rows: Sequence[Row]) -> str:
    cells = [list(vars(row).values()) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
