"""The norm of all gradients together, and the factor that clips it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def global_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients taken as one vector, a 0-dim tensor on their device.

    The gradients have been averaged over the data ranks, so every data rank gets the same value, bit for bit.
    """
    return torch.nn.utils.get_total_norm(list(gradients), norm_type=2.0)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what to multiply gradients by so that their norm is at most `max_norm`; 1 where it already is.

    Pascanu et al., On the difficulty of training recurrent neural networks, 2013, algorithm 1. `max_norm` 0 means no
    clipping. Nothing is read back from the device.
    """
    if max_norm == 0.0:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
