"""Which update is made: the torch optimizer, its parameter groups, and the schedule, scale and clipping around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.optimizer.lion import Lion
from megatron.optimizer.loss_scale import LossScale
from megatron.optimizer.weights import OwnedWeights

OptimizerName = Literal["adam", "adamw", "sgd", "lion"]


@dataclass(frozen=True)
class UpdateRule:
    """Everything that decides an update but the gradients. `max_norm` 0 means no clipping, `loss_scale` None that
    the loss is not scaled.

    `betas` and `eps` are Adam's and Lion's, `momentum` is SGD's. Weight decay is decoupled from the gradient
    (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019) for all but SGD, which has no other.
    """

    name: OptimizerName
    schedule: LearningRateSchedule
    loss_scale: LossScale | None
    max_norm: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0

    def build_inner(self, weights: OwnedWeights) -> torch.optim.Optimizer:
        """Return the torch optimizer over the masters, one fused kernel a tensor."""
        groups = _weight_decay_groups(weights, self.weight_decay)
        if self.name == "lion":
            return Lion(groups, lr=self.schedule.peak, betas=self.betas)
        if self.name == "sgd":
            return _sgd(groups, self.schedule.peak, self.momentum)
        return torch.optim.AdamW(groups, lr=self.schedule.peak, betas=self.betas, eps=self.eps, fused=True)


def _weight_decay_groups(
    weights: OwnedWeights, weight_decay: float
) -> list[dict[str, list[torch.nn.Parameter] | float]]:
    """Split into decayed matrices and the rest: norms and biases, which have one dim or none, are not decayed."""
    decayed = [master for name, master in weights.masters.items() if len(weights.shapes[name]) >= 2]
    others = [master for name, master in weights.masters.items() if len(weights.shapes[name]) < 2]
    groups: list[dict[str, list[torch.nn.Parameter] | float]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or [{"params": [], "weight_decay": 0.0}]


def _sgd(groups: list[dict], learning_rate: float, momentum: float) -> torch.optim.SGD:
    optimizer = torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, fused=True)
    if momentum:
        # torch allocates the buffer uninitialised in the first step and leaves it so when that step overflows.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
