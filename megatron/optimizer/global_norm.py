"""The norm of all gradients together, and the factor that clips it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class GlobalNorm:
    """The 2-norm of all gradients of the model taken as one vector, however they are spread over ranks.

    Every element must be counted on one rank of `group` only: `counted` are the parameters this rank answers for
    (None: all it has). `group` None means that every rank has everything.
    """

    device: torch.device
    counted: Collection[str] | None = None
    group: dist.ProcessGroup | None = None

    def of(self, gradients: Mapping[str, torch.Tensor], factor: float) -> torch.Tensor:
        """Return the norm of the gradients times `factor`, a 0-dim tensor on their device, equal on all ranks.

        Collective over `group`. A gradient that is not finite anywhere makes it infinite or NaN everywhere.
        """
        mine = [gradient for name, gradient in gradients.items() if self.counted is None or name in self.counted]
        norm = torch.nn.utils.get_total_norm(mine, norm_type=2.0) if mine else torch.zeros(())
        return self._over_ranks(norm.to(self.device) * factor)

    def spoil(self) -> None:
        """Make the norm NaN on all ranks that call `of`. Collective over `group`."""
        self._over_ranks(torch.full((), float("nan"), device=self.device))

    def _over_ranks(self, norm: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return norm
        # Squares are summed after unscaling: those of scaled gradients might not fit.
        square = norm.square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what to multiply gradients by so that their norm is at most `max_norm`; 1 where it already is.

    Pascanu et al., On the difficulty of training recurrent neural networks, 2013, algorithm 1. `max_norm` 0 means no
    clipping. Nothing is read back from the device.
    """
    if max_norm == 0.0:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
