"""From the results of single steps to one row a log interval."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron.monitor.memory import peak_memory_bytes
from megatron.monitor.record import TrainingRecord
from megatron.monitor.throughput import Throughput


class CommunicationTimes(Protocol):
    """What some collectives of one step cost this rank."""

    @property
    def in_flight_s(self) -> float:
        """Flight time."""

    @property
    def exposed_s(self) -> float:
        """The part of it the training thread was blocked for."""

    @property
    def bytes_sent(self) -> int:
        """What this rank sent."""


class StepResult(Protocol):
    """What the engine returns for one step."""

    @property
    def loss(self) -> torch.Tensor:
        """Scalar, nats a token, mean over the global batch; may still be being computed."""

    @property
    def grad_norm(self) -> torch.Tensor | float | None:
        """Global norm before clipping."""

    @property
    def learning_rate(self) -> float:
        """The rate of this step's update."""

    @property
    def loss_scale(self) -> float | None:
        """The scale this step's loss was multiplied with."""

    @property
    def skipped(self) -> torch.Tensor | bool:
        """Whether the update was left out because a gradient was not finite."""

    @property
    def grad_reduce(self) -> CommunicationTimes | None:
        """None when nothing was reduced."""

    @property
    def param_gather(self) -> CommunicationTimes | None:
        """None when nothing was gathered."""


@dataclass
class _Interval:
    """What was collected since the last row."""

    start_s: float
    excluded_s: float = 0.0
    warm_up_s: float | None = None
    """Time of the process's first step, if it is in this interval."""
    learning_rate: float = 0.0
    loss_scale: float | None = None
    losses: list[torch.Tensor | float] = field(default_factory=list)
    norms: list[torch.Tensor | float | None] = field(default_factory=list)
    skipped: list[torch.Tensor | float] = field(default_factory=list)
    grad_reductions: list[CommunicationTimes | None] = field(default_factory=list)
    param_gathers: list[CommunicationTimes | None] = field(default_factory=list)

    def step_time_s(self, elapsed_s: float) -> tuple[float, int]:
        """Mean time of the steps that count, and how many at the start do not (0 or 1)."""
        if self.warm_up_s is None or len(self.losses) == 1:
            return elapsed_s / len(self.losses), 0
        return (elapsed_s - self.warm_up_s) / (len(self.losses) - 1), 1


@dataclass(frozen=True)
class _Communication:
    """Means over steps."""

    in_flight_s: float | None = None
    exposed_s: float | None = None
    hidden_fraction: float | None = None
    bytes_sent: int | None = None


class IntervalMeter:
    """Collects step results without waiting for the device, and reads them once, at the end of a log interval.

    `lm_loss` and `grad_norm` of a row are means over the interval, as GPT-NeoX logs its loss, so a row does not depend
    on which batch happened to be last. Skipped steps leave them out: their values are often not finite.

    Times are wall times, data loading included; what runs inside `excluded()` (evaluation, checkpoints) is not. The
    first step of the process also allocates, compiles and connects: it is left out of the times of an interval that has
    other steps, and stands alone when the interval is that one step.
    """

    def __init__(
        self,
        throughput: Throughput,
        device: torch.device,
        *,
        num_skipped: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the clock: make it right before the first step. `num_skipped`: by the runs this one continues."""
        self.num_skipped = num_skipped
        self._throughput = throughput
        self._device = device
        self._clock = clock
        self._is_first_step = True
        self._interval = _Interval(start_s=self._now_s())

    def add(self, result: StepResult) -> None:
        """Take the result of the step that was just launched."""
        interval = self._interval
        # Clones: an engine may hand out the same buffer every step.
        interval.losses.append(_clone(result.loss))
        interval.norms.append(None if result.grad_norm is None else _clone(result.grad_norm))
        interval.skipped.append(_clone(result.skipped))
        interval.grad_reductions.append(result.grad_reduce)
        interval.param_gathers.append(result.param_gather)
        interval.learning_rate = result.learning_rate
        interval.loss_scale = result.loss_scale
        if self._is_first_step:
            self._is_first_step = False
            interval.warm_up_s = self._elapsed_s()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time inside is no step's. Steps launched before are waited for: their work is not excluded."""
        start_s = self._now_s()
        try:
            yield
        finally:
            self._interval.excluded_s += self._now_s() - start_s

    def end_interval(self, iteration: int) -> TrainingRecord:
        """The row of the steps since the last one, the newest of them being `iteration`; starts the next interval.

        Waits for the device. Raises ValueError without any step.
        """
        interval = self._interval
        if not interval.losses:
            raise ValueError(f"no step was added in the interval that ends at iteration {iteration}")
        is_skipped = [bool(value) for value in _read(interval.skipped)]
        self.num_skipped += sum(is_skipped)
        step_time_s, num_untimed = interval.step_time_s(self._elapsed_s())
        reduced = _mean_communication(interval.grad_reductions[num_untimed:])
        gathered = _mean_communication(interval.param_gathers[num_untimed:])
        record = TrainingRecord(
            iteration=iteration,
            lm_loss=_mean(_applied(_read(interval.losses), is_skipped)),
            grad_norm=_mean_norm(interval.norms, is_skipped),
            learning_rate=interval.learning_rate,
            loss_scale=interval.loss_scale,
            skipped=self.num_skipped,
            step_time_s=step_time_s,
            tokens_per_s=self._throughput.tokens_per_s(step_time_s),
            tflops_per_device=self._throughput.tflops_per_device(step_time_s),
            mfu=self._throughput.mfu(step_time_s),
            grad_reduce_s=reduced.in_flight_s,
            exposed_grad_reduce_s=reduced.exposed_s,
            hidden_fraction=reduced.hidden_fraction,
            grad_reduce_bytes=reduced.bytes_sent,
            param_gather_s=gathered.in_flight_s,
            exposed_param_gather_s=gathered.exposed_s,
            param_gather_bytes=gathered.bytes_sent,
            peak_memory_bytes=peak_memory_bytes(self._device),
        )
        self._interval = _Interval(start_s=self._now_s())
        return record

    def _elapsed_s(self) -> float:
        return self._now_s() - self._interval.start_s - self._interval.excluded_s

    def _now_s(self) -> float:
        """The time once all work launched so far is done."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock()


def _clone(value: torch.Tensor | float) -> torch.Tensor | float:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _read(values: Sequence[torch.Tensor | float]) -> list[float]:
    """The values on the host, tensors in one transfer."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) < len(values):
        return [float(value) for value in values]
    return [float(value) for value in torch.stack([tensor.reshape(()) for tensor in tensors]).cpu().tolist()]


def _mean_norm(norms: Sequence[torch.Tensor | float | None], is_skipped: Sequence[bool]) -> float | None:
    measured = [(norm, skipped) for norm, skipped in zip(norms, is_skipped, strict=True) if norm is not None]
    if not measured:
        return None
    return _mean(_applied(_read([norm for norm, _ in measured]), [skipped for _, skipped in measured]))


def _applied(values: Sequence[float], is_skipped: Sequence[bool]) -> Sequence[float]:
    """The values of the steps that were not skipped; all of them if every one was."""
    return [value for value, skipped in zip(values, is_skipped, strict=True) if not skipped] or values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_communication(steps: Sequence[CommunicationTimes | None]) -> _Communication:
    measured = [step for step in steps if step is not None]
    if not measured:
        return _Communication()
    in_flight_s = _mean([step.in_flight_s for step in measured])
    exposed_s = _mean([step.exposed_s for step in measured])
    return _Communication(
        in_flight_s=in_flight_s,
        exposed_s=exposed_s,
        # Two clocks are compared, so a reduction nothing hides may read a little above its flight time.
        hidden_fraction=max(0.0, 1.0 - exposed_s / in_flight_s) if in_flight_s > 0 else None,
        bytes_sent=round(_mean([step.bytes_sent for step in measured])),
    )
