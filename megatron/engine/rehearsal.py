"""One synthetic forward and backward before the first step.

It shows in which order gradients become ready, lets memory trouble surface before any data is read, and names what gets
no gradient. It leaves weights, gradients and random streams as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from megatron.data_parallel.ready_order import complete_ready_order, record_ready_order
from megatron.engine.random_streams import kept_random_state


def rehearse(forward: Callable[[], torch.Tensor], parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """Return the names of `parameters` in the order in which backward finishes their gradients.

    `forward` returns what to call backward on.

    Raises ConfigError when no parameter gets a gradient, or one gets it in several pieces.
    """
    with kept_random_state(), record_ready_order(parameters) as seen:
        forward().backward()
    return complete_ready_order(seen, parameters)
