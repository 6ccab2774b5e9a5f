"""Collectives over the tensor ranks that are started now and waited for later.

They travel in the tensor's own dtype, along any dim. All of them are collective over the tensor group: every rank must
call them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.mpu.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Pending:
    """A collective that was started. `result` makes the outcome of what arrived."""

    work: dist.Work
    result: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        """Return the outcome, once it is there (on an accelerator: in the order of the current stream)."""
        self.work.wait()
        return self.result()


def start_all_reduce(x: torch.Tensor, tensor_parallel: TensorParallel) -> Pending:
    """Sum a contiguous `x` over the ranks, in place."""
    return Pending(_started(dist.all_reduce(x, group=tensor_parallel.group, async_op=True)), lambda: x)


def start_gather(x: torch.Tensor, tensor_parallel: TensorParallel, *, dim: int) -> Pending:
    """Concatenate the ranks' equal parts along `dim`, in order of rank."""
    x = x.contiguous()
    flat = x.new_empty(tensor_parallel.size * x.numel())
    work = dist.all_gather_single(flat, x.view(-1), group=tensor_parallel.group, async_op=True)
    return Pending(_started(work), lambda: _joined(flat.view(-1, *x.shape), dim))


def start_reduce_scatter(x: torch.Tensor, tensor_parallel: TensorParallel, *, dim: int) -> Pending:
    """Sum over the ranks and keep this rank's equal part along `dim`. Raises ValueError when `dim` does not divide."""
    parts = _parts(x, tensor_parallel, dim)
    group = tensor_parallel.group
    if dist.get_backend(group) == "gloo":
        # gloo's own sends everything to everyone. Here each element crosses once and is summed where it is needed,
        # low precision in fp32.
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received.view(-1), parts.view(-1), group=group, async_op=True)
        sum_dtype = torch.promote_types(x.dtype, torch.float32)
        return Pending(_started(work), lambda: received.sum(0, dtype=sum_dtype).to(x.dtype))
    mine = torch.empty_like(parts[0])
    work = dist.reduce_scatter_single(mine.view(-1), parts.view(-1), group=group, async_op=True)
    return Pending(_started(work), lambda: mine)


def _parts(x: torch.Tensor, tensor_parallel: TensorParallel, dim: int) -> torch.Tensor:
    """Return the equal parts of `x` along `dim` one behind the other, as a new leading dim."""
    tensor_parallel.check_length(x.shape[dim])
    dim %= x.dim()
    return x.unflatten(dim, (tensor_parallel.size, -1)).movedim(dim, 0).contiguous()


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Inverse of `_parts`."""
    dim %= parts.dim() - 1
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in its own tensor group"
    return work
