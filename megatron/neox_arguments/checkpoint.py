"""What is saved, when, and what is loaded."""

from __future__ import annotations

from typing import Literal

from megatron.neox_arguments.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class CheckpointArgs(Section):
    """Checkpoints."""

    save: str | None = None
    """Directory to save into. Unset: nothing is saved."""
    load: str | None = None
    """Directory to resume from; starts from scratch if there is no checkpoint in it."""
    iteration: PositiveInt | None = None
    """Load the checkpoint of this iteration instead of the latest."""
    checkpoint_factor: PositiveFloat | None = None
    """Iterations between checkpoints, or with `checkpoint_scale: log` the ratio of one interval to the one before."""
    checkpoint_scale: Literal["linear", "log"] = "linear"
    """Spacing of checkpoints."""
    extra_save_iters: list[NonNegativeInt] | None = None
    """Further iterations to save at; these are never deleted."""
    keep_last_n_checkpoints: PositiveInt | None = None
    """Delete older checkpoints than this many. Unset: keep all."""
    no_save_optim: bool = False
    """Leave optimizer state out."""
    no_save_rng: bool = False
    """Leave random states out."""
    no_load_optim: bool = False
    """Start with a fresh optimizer."""
    no_load_rng: bool = False
    """Start with fresh random states."""
    finetune: bool = False
    """Take the weights only and start at iteration 0."""
