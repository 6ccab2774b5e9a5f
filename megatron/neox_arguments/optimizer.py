"""The update: optimizer, schedule, precision and loss scale."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megatron.neox_arguments.section import (
    DERIVED,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    whole_number,
)

# What each optimizer takes in `optimizer.params`; a value none of these uses is refused rather than ignored.
PARAMS_OF: dict[str, tuple[str, ...]] = {
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "sgd": ("lr", "momentum", "weight_decay"),
    "lion": ("lr", "betas", "weight_decay"),
}

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerArgs(Section):
    """In YAML the optimizer is a nested value: `optimizer: {type: AdamW, params: {lr: 6e-4, betas: [0.9, 0.95]}}`."""

    optimizer_type: Literal["adam", "adamw", "sgd", "lion"] = "adam"
    """`optimizer.type`. Adam means AdamW, as in NeoX: weight decay is decoupled from the gradient."""
    lr: PositiveFloat
    """Peak learning rate: `optimizer.params.lr`."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """Decay of the running averages of Adam and Lion: `optimizer.params.betas`."""
    eps: PositiveFloat = 1e-8
    """Added to Adam's denominator: `optimizer.params.eps`."""
    momentum: Beta = 0.0
    """Momentum of SGD: `optimizer.params.momentum`."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices; norms and biases are not decayed."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global norm of the gradients; 0 clips nothing. NeoX's `clip_grad` is the same."""

    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = "linear"
    """Course of the learning rate after warmup."""
    lr_decay_iters: PositiveInt = DERIVED
    """Updates until the end of the decay, warmup included. Unset: `lr_decay_fraction` of `train_iters`."""
    lr_decay_fraction: Probability | None = None
    """Share of `train_iters` until the end of the decay. Unset: all."""
    min_lr: NonNegativeFloat = 0.0
    """The rate never decays below this."""
    warmup: Probability = 0.01
    """Share of `lr_decay_iters` over which the rate rises from 0 to its peak."""

    precision: Literal["fp32", "bfloat16", "fp16"] = "fp32"
    """Dtype of parameters and activations. Master weights, gradients in accumulation and optimizer state are fp32."""
    loss_scale: NonNegativeFloat | None = None
    """fp16 only: a constant loss scale. Unset or 0: a dynamic one."""
    initial_scale_power: Annotated[int, BeforeValidator(whole_number), Field(ge=0, le=127)] = 16
    """The dynamic loss scale starts at 2 to this power; fp32 holds no more than 2 to the 127."""
    loss_scale_window: PositiveInt = 1000
    """Steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: PositiveInt = 2
    """Overflows before the dynamic loss scale is halved."""
    min_scale: PositiveFloat = 1.0
    """The dynamic loss scale never falls below this."""
