"""Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay.

    Follows torch's protocol of fused optimizers: with `grad_scale` set, gradients are divided by it, and where
    `found_inf` is 1 nothing is updated; neither is read back from the device.
    """

    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad if self.grad_scale is None else parameter.grad / self.grad_scale
        momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
        beta_update, beta_momentum = group["betas"]
        direction = torch.lerp(gradient, momentum, beta_update).sign_()
        updated = (parameter * (1.0 - group["lr"] * group["weight_decay"])).sub_(direction, alpha=group["lr"])
        next_momentum = torch.lerp(gradient, momentum, beta_momentum)
        if self.found_inf is not None:
            overflowed = self.found_inf.to(torch.bool)
            updated = torch.where(overflowed, parameter, updated)
            next_momentum = torch.where(overflowed, momentum, next_momentum)
        parameter.copy_(updated)
        momentum.copy_(next_momentum)
