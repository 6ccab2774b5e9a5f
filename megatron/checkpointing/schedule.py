"""At which iterations a checkpoint is due."""

from collections.abc import Iterable, Iterator

from megatron.errors import ConfigError


def save_iterations(
    train_iters: int,
    *,
    checkpoint_factor: float | None,
    checkpoint_scale: str = "linear",
    extra_save_iters: Iterable[int] | None = None,
) -> frozenset[int]:
    """Iterations in 1..train_iters after which to save; the last one always belongs to them.

    `linear`: every multiple of `checkpoint_factor`. `log`: the powers 1, f, f^2, ... of it, rounded down, as GPT-NeoX
    counts them. `extra_save_iters` come on top. Raises ConfigError for a factor that gives no such sequence.
    """
    due = {train_iters, *(extra_save_iters or ())}
    if checkpoint_factor is not None:
        due.update(_regular_iterations(train_iters, checkpoint_factor, checkpoint_scale))
    return frozenset(iteration for iteration in due if 1 <= iteration <= train_iters)


def _regular_iterations(train_iters: int, factor: float, scale: str) -> Iterator[int]:
    if scale == "linear":
        if factor < 1 or factor != int(factor):
            raise ConfigError(
                f"checkpoint_factor is {factor}: with checkpoint_scale 'linear' it is the number of iterations "
                "between two checkpoints, a whole number of at least 1"
            )
        yield from range(int(factor), train_iters + 1, int(factor))
    elif scale == "log":
        if factor <= 1:
            raise ConfigError(
                f"checkpoint_factor is {factor}: with checkpoint_scale 'log' each interval is this many times the one "
                "before, so it must be greater than 1"
            )
        power = 1.0
        while power <= train_iters:
            yield int(power)
            power *= factor
    else:
        raise ConfigError(f"checkpoint_scale is {scale!r}: it must be 'linear' or 'log'")
