"""One synthetic forward and backward before the first step.

It shows in which order gradients become ready, lets memory trouble surface before any data is read, and names what gets
no gradient. It leaves weights, gradients and random streams as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from megatron.data_parallel.ready_order import complete_ready_order, record_ready_order


def rehearse(forward: Callable[[], torch.Tensor], parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """Return the names of `parameters` in the order in which backward finishes their gradients.

    `forward` returns what to call backward on.

    Raises ConfigError when no parameter gets a gradient, or one gets it in several pieces.
    """
    with _random_state_kept(), record_ready_order(parameters) as seen:
        forward().backward()
    return complete_ready_order(seen, parameters)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Put the random streams of CPU and accelerator back at exit."""
    accelerator = torch.accelerator.current_accelerator()
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    kind = "cuda" if accelerator is None else accelerator.type
    with torch.random.fork_rng(devices=devices, device_type=kind):
        yield
