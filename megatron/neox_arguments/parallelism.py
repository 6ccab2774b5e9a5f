"""How ranks are arranged, and when and how gradients are reduced."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megatron.neox_arguments.section import (
    DERIVED,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    whole_number,
)

WireDtype = Literal["fp32", "bfloat16", "fp16"]


def _partition_method(value: str) -> str:
    if value in ("uniform", "parameters"):
        return value
    if not value.startswith("type:"):
        raise ValueError("is neither uniform nor parameters nor type:<regular expression>")
    try:
        re.compile(value.removeprefix("type:"))
    except re.error as error:
        raise ValueError(f"has a regular expression that is none: {error}") from error
    return value


class ParallelismArgs(Section):
    """The rank grid and the reduction of gradients."""

    pipe_parallel_size: NonNegativeInt = 0
    """Number of pipeline stages. 0 and 1 mean the same: one stage, no pipeline."""
    pipe_partition_method: Annotated[str, AfterValidator(_partition_method)] = "type:transformer|mlp"
    """How layers are divided into stages, the heaviest as light as it can be. What a layer weighs: `uniform` 1,
    `parameters` as many as it has, `type:<regular expression>` 1 if its name matches; only blocks have one."""
    model_parallel_size: PositiveInt = 1
    """Number of ranks that split each layer (tensor parallelism)."""
    sequence_parallel: bool = False
    """Split what lies between the layers of tensor ranks (norms, dropout, residuals) along the sequence, for memory.
    `seq_length` must be a multiple of `model_parallel_size`; without effect at `model_parallel_size` 1."""
    data_parallel_size: PositiveInt = DERIVED
    """Derived: world size over pipe and tensor sizes. If set, it must be just that."""
    world_size: PositiveInt = DERIVED
    """Derived: number of processes of the run."""
    distributed_backend: Literal["nccl", "gloo", "mpi", "ucc", "xccl", "hccl"] | None = None
    """torch.distributed backend. Unset: gloo without an accelerator, else the accelerator's own."""
    distributed_timeout_seconds: PositiveInt = 600
    """A collective that takes longer than this ends the run on every rank."""

    zero_stage: Annotated[int, BeforeValidator(whole_number), Field(ge=0, le=3)] = 0
    """What is sharded over the data ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. Also
    `zero_optimization.stage`."""

    overlap_grad_reduce: bool = False
    """Start the reduction of each gradient bucket while backward goes on, instead of after it. Same bits either way."""
    delay_grad_reduce: bool = True
    """With `overlap_grad_reduce` and a pipeline, all stages but the first start the reduction when their last backward
    has ended, in the time in which they would wait for the first: on a slow link they do not take from it what earlier
    stages need. False: under backward on every stage."""
    overlap_param_gather: bool | None = None
    """With ZeRO 1 and 2, gather the parameters that other ranks have updated while the next forward goes on: each layer
    waits for its own just before it runs. Same bits either way. Unset: as `overlap_grad_reduce`."""
    ddp_bucket_size: PositiveInt | None = None
    """Gradient elements in a bucket. Smaller buckets start earlier, larger ones cost less each. Unset: chosen."""
    grad_reduce_in_fp32: bool | None = None
    """Send gradients in fp32 (true) or in the training precision (false). Unset: fp32, which gradients are accumulated
    in."""
    fp32_allreduce: bool = False
    """NeoX's name for `grad_reduce_in_fp32: true`."""
    communication_data_type: WireDtype | None = None
    """Dtype in which gradients are sent, whatever the training precision. They are accumulated in fp32 all the same."""
    grad_wire_dtype: WireDtype = "fp32"
    """Derived from the three above."""
    prescale_gradients: bool = True
    """Divide by the data-parallel size while accumulating in fp32, which costs nothing. False: divide the sum in a pass
    of its own after the collective, as DeepSpeed does by default."""
    gradient_predivide_factor: PositiveFloat = 1.0
    """With `prescale_gradients: false`, divide by this before the collective and by the rest after it."""
    average_in_collective: bool = False
    """Let the backend average instead of dividing ourselves."""
    zero_bucket_limit: PositiveInt | None = None
    """Most elements in a bucket with ZeRO 1 and 2, where `ddp_bucket_size` says nothing: the smaller of
    `zero_optimization.reduce_bucket_size` and `allgather_bucket_size`."""
    prove_overlap_steps: NonNegativeInt = 0
    """Make this many steps both with and without overlap from the same state, compare every reduced gradient bit for
    bit, and say what came out. Such a step takes three times as long."""
    check_for_nan_in_grad: bool = False
    """Before each bucket is sent, stop with the parameter's name if a gradient is not finite. Waits for the device."""
