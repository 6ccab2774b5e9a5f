"""The log line of an interval, and the progress bar under it on a terminal."""

import logging
import os
from collections.abc import Mapping
from typing import TextIO

from megatron.monitor.record import TrainingRecord, ValidationRecord
from megatron.monitor.sink import Sink

logger = logging.getLogger(__name__)


class ConsoleSink(Sink):
    """Logs one plain line a record, the same on a terminal, in a file and in CI."""

    def __init__(self, *, total_iterations: int) -> None:
        self._total_iterations = total_iterations

    def training(self, record: TrainingRecord) -> None:
        """Log the interval."""
        logger.info("%s", training_line(record, self._total_iterations))

    def validation(self, record: ValidationRecord) -> None:
        """Log the evaluation."""
        logger.info("%s", validation_line(record, self._total_iterations))


def training_line(record: TrainingRecord, total_iterations: int) -> str:
    """What a reader wants to know of an interval, in a fixed order; what does not apply is left out."""
    parts = [
        f"iteration {record.iteration}/{total_iterations}",
        f"loss {record.lm_loss:.4f}",
        f"lr {record.learning_rate:.2e}",
    ]
    if record.grad_norm is not None:
        parts.append(f"norm {record.grad_norm:.3f}")
    parts.append(f"{record.tokens_per_s:,.0f} tokens/s")
    parts.append(f"{_three_digits(record.tflops_per_device)} TFLOPS/device")
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    if record.exposed_grad_reduce_s is not None:
        parts.append(f"exposed {record.exposed_grad_reduce_s * 1e3:.1f} ms")
    if record.hidden_fraction is not None:
        parts.append(f"hidden {record.hidden_fraction:.0%}")
    if record.loss_scale is not None:
        parts.append(f"scale {record.loss_scale:g}")
    if record.loss_scale is not None or record.skipped:
        parts.append(f"skipped {record.skipped}")
    parts.append(f"eta {duration((total_iterations - record.iteration) * record.step_time_s)}")
    return " | ".join(parts)


def validation_line(record: ValidationRecord, total_iterations: int) -> str:
    """The line of an evaluation."""
    return (
        f"iteration {record.iteration}/{total_iterations} | {record.split} loss {record.lm_loss:.4f} | "
        f"ppl {record.ppl:.2f}"
    )


def duration(seconds: float) -> str:
    """`2d03h`, `1h02m`, `3m05s` or `12s`: the two largest units, rounded to the second."""
    minutes, s = divmod(round(max(seconds, 0.0)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{hours}h{m:02}m"
    return f"{m}m{s:02}s" if minutes else f"{s}s"


def _three_digits(value: float) -> str:
    """`123`, `12.3`, `1.23` or `0.0123`: a CPU and a GPU are four orders of magnitude apart."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


class ProgressSink(Sink):
    """A tqdm bar over the steps of the run, on a terminal. Log lines appear above it (see `megatron.monitor.log`)."""

    def __init__(self, *, start_iteration: int, total_iterations: int, stream: TextIO) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total_iterations, initial=start_iteration, file=stream, unit="step", dynamic_ncols=True, leave=False
        )

    def step(self, iteration: int) -> None:
        """Move the bar."""
        self._bar.update(iteration - self._bar.n)

    def training(self, record: TrainingRecord) -> None:
        """Show the loss."""
        self._bar.set_postfix_str(f"loss {record.lm_loss:.4f}", refresh=False)

    def close(self, *, failed: bool = False) -> None:
        """Remove the bar."""
        self._bar.close()


def can_draw_bar(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `stream` is a terminal that can redraw a line; a CI job's never counts as one."""
    return stream.isatty() and environ.get("TERM") != "dumb" and environ.get("CI", "") in ("", "0", "false")
