"""The loop: step, log, evaluate, save, stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.data.micro_batch import MicroBatch
from megatron.engine.results import StepResult
from megatron.engine.surface import Engine
from megatron.monitor.interval import IntervalMeter
from megatron.monitor.sink import Sinks
from megatron.training.signals import StopSignals
from megatron.training.state import StopReason, TrainState


@dataclass(frozen=True)
class Cadence:
    """When things are due, in iterations. None means never."""

    train_iters: int
    log_interval: int
    eval_interval: int | None
    save_iterations: frozenset[int]
    exit_interval: int | None

    def logs_at(self, iteration: int) -> bool:
        """Whether a row is due; the first iteration and the last always have one."""
        return iteration % self.log_interval == 0 or iteration in (1, self.train_iters)

    def evaluates_at(self, iteration: int) -> bool:
        """Whether an evaluation is due; the one at the end of training is not counted here."""
        return bool(self.eval_interval) and iteration % (self.eval_interval or 1) == 0 and iteration < self.train_iters

    def exits_at(self, iteration: int) -> bool:
        """Whether the run ends here although training has not."""
        return bool(self.exit_interval) and iteration % (self.exit_interval or 1) == 0


@dataclass(frozen=True)
class Loop:
    """What a run consists of. `evaluate` writes a validation row, `save` a checkpoint; both are collective."""

    engine: Engine
    micro_batches: Iterator[MicroBatch]
    train_batch_size: int
    cadence: Cadence
    meter: IntervalMeter
    sinks: Sinks
    signals: StopSignals
    evaluate: Callable[[TrainState], object]
    save: Callable[[TrainState], object]

    def run(self, state: TrainState) -> StopReason:
        """Train from `state` on, which is kept up to date, until done or asked to stop. Collective over all ranks."""
        cadence = self.cadence
        before: StepResult | None = None
        while state.iteration < cadence.train_iters:
            result = self.engine.train_batch(self.micro_batches, stop_requested=self.signals.stop_requested)
            state.advance(self.train_batch_size)
            self.meter.add(result)
            self.sinks.step(state.iteration)
            if cadence.logs_at(state.iteration):
                self.sinks.training(self.meter.end_interval(state.iteration))
            if cadence.evaluates_at(state.iteration):
                with self.meter.excluded():
                    self.evaluate(state)
            stop = self._stop_reason(state, before)
            if stop or state.iteration in cadence.save_iterations:
                with self.meter.excluded():
                    self.save(state)
            if stop:
                return stop
            before = result
        return StopReason.FINISHED

    def _stop_reason(self, state: TrainState, before: StepResult | None) -> StopReason | None:
        """Why to stop now. Requests are read a step late, when they have long arrived and reading waits for nothing."""
        if before is not None and float(before.stop_requested) > 0 and state.iteration < self.cadence.train_iters:
            return StopReason.SIGNAL
        return StopReason.EXIT_INTERVAL if self.cadence.exits_at(state.iteration) else None
