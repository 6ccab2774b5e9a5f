"""A random stream of its own for each tensor rank.

All tensor ranks of a data rank draw from equal default streams, so dropout on activations that each of them holds
whole falls on the same elements, and the copies stay equal. Where each holds another part (heads of attention; part of
the sequence) the masks must differ. Such a place runs in `rank_random_stream`.

The stream is no second state to keep: at each entrance the default stream gives every tensor rank a seed. What saves,
restores or replays the default stream (a checkpoint, recomputation of activations) so does the same for this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.mpu.tensor_parallel import TensorParallel

_NUM_SEEDS = 2**32  # torch's CPU generator uses no more bits of a seed


@contextmanager
def rank_random_stream(tensor_parallel: TensorParallel, device: torch.device) -> Iterator[None]:
    """Let what draws from `device`'s default generator inside draw differently on every tensor rank.

    Advances torch's default CPU generator by `size` draws, on each rank alike; `device`'s is otherwise as before at
    exit. Does nothing with one tensor rank.
    """
    if tensor_parallel.size == 1:
        yield
        return
    # From the CPU's generator whatever the device is: reading a seed from an accelerator would wait for it.
    seeds = torch.randint(_NUM_SEEDS, (tensor_parallel.size,), device="cpu")
    seed = int(seeds[tensor_parallel.rank])
    generator = _default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.get_device_module(device).default_generators
    return generators[torch.accelerator.current_device_index() if device.index is None else device.index]
