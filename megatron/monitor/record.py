"""The two kinds of metrics row and their text form.

The field names are the interface other tools read (`metrics.jsonl`); a test freezes them.
"""

import json
import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class TrainingRecord:
    """One log interval of training. `None` where a value does not apply.

    Losses and norms are means over the steps of the interval that were applied (over all of them if every one was
    skipped); times are means over its steps. Learning rate and loss scale are those of the last step.
    """

    iteration: int
    """Steps done when the row was written, over the whole run; the first step is 1."""
    lm_loss: float
    """Nats a token."""
    grad_norm: float | None
    """Global L2 norm before clipping."""
    learning_rate: float
    loss_scale: float | None
    """None unless the loss is scaled (fp16)."""
    skipped: int
    """Steps skipped so far, over the whole run, because their gradients were not finite."""
    step_time_s: float
    """Wall time of one step, evaluation and checkpoints left out."""
    tokens_per_s: float
    """Of the whole run, all devices together."""
    tflops_per_device: float
    """Model FLOPs only: what activation checkpointing computes again is not counted."""
    mfu: float | None
    """`tflops_per_device` over the device's peak, 0 to 1; None when the peak is not known."""
    grad_reduce_s: float | None
    """Flight time of the gradient collectives of one step; None when there is nothing to reduce."""
    exposed_grad_reduce_s: float | None
    """The part of it the training thread was blocked for."""
    hidden_fraction: float | None
    """1 - exposed / flight time, 0 to 1."""
    grad_reduce_bytes: int | None
    """What one rank sends in one step."""
    param_gather_s: float | None
    """Flight time of the collectives that gather updated parameters; None when no rank updates shards."""
    exposed_param_gather_s: float | None
    """The part of it the training thread was blocked for."""
    param_gather_bytes: int | None
    """What one rank sends for it in one step."""
    peak_memory_bytes: int | None
    """High-water mark of rank 0 since the process started: device memory, or resident memory on CPU."""


@dataclass(frozen=True)
class ValidationRecord:
    """One evaluation of one split."""

    iteration: int
    split: str
    lm_loss: float
    """Nats a token."""
    ppl: float
    """exp(lm_loss); infinite where that overflows."""

    @classmethod
    def of_loss(cls, iteration: int, split: str, lm_loss: float) -> "ValidationRecord":
        """The record of a mean loss in nats a token."""
        try:
            ppl = math.exp(lm_loss)
        except OverflowError:
            ppl = math.inf
        return cls(iteration=iteration, split=split, lm_loss=lm_loss, ppl=ppl)


Record = TrainingRecord | ValidationRecord


def to_json(record: Record) -> str:
    """One line of JSON without its newline, keys in field order, floats as Python's shortest exact repr.

    JSON has no NaN or infinity, and many readers refuse the spelling Python would write: such values become null.
    A loss always applies, so `"lm_loss": null` means it was not finite.
    """
    row = {name: None if _is_not_finite(value) else value for name, value in asdict(record).items()}
    return json.dumps(row, allow_nan=False)


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
