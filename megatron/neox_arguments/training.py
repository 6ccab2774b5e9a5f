"""How long and on how much at a time."""

from __future__ import annotations

from megatron.neox_arguments.section import DERIVED, NonNegativeInt, PositiveInt, Section


class TrainingArgs(Section):
    """Batch, length, evaluation and seed."""

    train_batch_size: PositiveInt = DERIVED
    """Samples a step over all data ranks = micro-batch x accumulation x data-parallel size. Solved if unset."""
    train_micro_batch_size_per_gpu: PositiveInt = DERIVED
    """Samples of one forward on one rank. NeoX's `batch_size` is the same."""
    gradient_accumulation_steps: PositiveInt = DERIVED
    """Micro-batches a step. Solved if unset, 1 if nothing else decides it."""
    train_iters: PositiveInt
    """Number of steps."""
    eval_interval: PositiveInt | None = 1000
    """Steps between evaluations; null never evaluates."""
    eval_iters: NonNegativeInt = 100
    """Batches of an evaluation; 0 never evaluates."""
    exit_interval: PositiveInt | None = None
    """Save and end the run, with status 0, at each multiple of this."""
    seed: NonNegativeInt = 1234
    """Seed of weights, of the order of samples and of dropout."""
