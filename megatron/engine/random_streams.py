"""Random streams put back where they were, around passes that are not training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the random streams of CPU and accelerator back at exit."""
    accelerator = torch.accelerator.current_accelerator()
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    kind = "cuda" if accelerator is None else accelerator.type
    with torch.random.fork_rng(devices=devices, device_type=kind):
        yield
