"""What is reduced in this run, with whom and when: the table that every run begins with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.data_parallel.partition import BucketPlan, ReductionGroup, ReductionPlan
from megatron.engine.reduction_settings import ReductionSettings
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


def reduction_table(plan: ReductionPlan, reduction: ReductionSettings, grid: ParallelGrid) -> str:
    """Return the table of all stages, on every rank. Collective over the pipe group.

    A line is a reduction group of a stage; `MB in all` are its gradients on the wire, however they are exchanged.
    """
    by_group: dict[str, list[BucketPlan]] = {}
    for bucket in plan.buckets:
        by_group.setdefault(bucket.group.name, []).append(bucket)
    mine = [row for name in sorted(by_group) for row in _rows_of(by_group[name], reduction, grid.pipe.rank)]
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


def _rows_of(buckets: Sequence[BucketPlan], reduction: ReductionSettings, stage: int) -> list[Row]:
    """Return the lines of one group, which all `buckets` belong to."""
    group = buckets[0].group
    if group.size == 1:
        return [Row(str(stage), f"gradients, {group.name}", "1", str(len(buckets)), "0.0", "nothing", "one rank")]
    ranks, num_buckets = str(group.size), str(len(buckets))
    num_elements = sum(bucket.num_elements for bucket in buckets)
    sharded, wire = buckets[0].sharded, reduction.arithmetic.wire_dtype
    parameters: torch.dtype = getattr(torch, buckets[0].parameter_dtype.removeprefix("torch."))

    def row(what: str, dtype: torch.dtype, exchange: str, when: str) -> Row:
        sent = f"{num_elements * dtype.itemsize / 1e6:.1f}"
        return Row(str(stage), f"{what}, {group.name}", ranks, num_buckets, sent, f"{_name(dtype)} {exchange}", when)

    when = _when_reduced(group, reduction, stage)
    if not sharded:
        return [row("gradients", wire, "all-reduce", when)]
    return [
        row("gradients", wire, "reduce-scatter", when),
        row("parameters", parameters, "all-gather", _when_gathered(reduction)),
    ]


def _when_reduced(group: ReductionGroup, reduction: ReductionSettings, stage: int) -> str:
    every_backward = reduction.zero_stage == 2 and not group.spans_stages
    backward = "each backward" if every_backward else "the last backward"
    if not reduction.overlap:
        return f"after {backward}: overlap_grad_reduce is off"
    if stage > 0 and reduction.delay_on_later_stages:
        before = "under each backward but the last, then " if every_backward else ""
        return f"{before}after the last backward, while stage 0 has its own: delay_grad_reduce"
    return f"under {backward}" + (", as its last bucket: both stages must have it" if group.spans_stages else "")


def _when_gathered(reduction: ReductionSettings) -> str:
    if reduction.overlap_param_gather:
        return "under the next forward"
    return "after the update: overlap_param_gather is off"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(rows: Sequence[Row]) -> str:
    cells = [list(vars(row).values()) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
