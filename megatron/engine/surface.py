"""What loop, evaluation and checkpoints know of an engine, whoever owns the gradient under it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from megatron.engine.results import StepResult
from megatron.optimizer.progress import OptimizerProgress

T = TypeVar("T", bound="OnDevice")


class OnDevice(Protocol):
    """A micro-batch: whatever the module takes, as long as it can be moved."""

    def to(self: T, device: torch.device) -> T:
        """Return the micro-batch on `device`."""
        ...


@dataclass(frozen=True)
class EngineTensors:
    """By the names of the engine's module: weights, and each parameter's optimizer state by state name.

    Whole tensors, but for the state of parameters of which this rank has shards: flat runs.

    What is handed out to be loaded into only promises `shape`, `dtype` and `copy_`.
    """

    weights: Mapping[str, torch.Tensor]
    optimizer_state: Mapping[str, Mapping[str, torch.Tensor]]


class Progress(Protocol):
    """The part of an optimizer that a checkpoint keeps besides tensors."""

    @property
    def progress(self) -> OptimizerProgress:
        """Counters and loss scale after the last step."""
        ...

    @property
    def shards(self) -> Mapping[str, range] | None:
        """Which elements of each parameter this rank has the optimizer state of; None: all of every one."""
        ...

    def restore_progress(self, progress: OptimizerProgress) -> None:
        """Go on from a checkpoint's counters and loss scale."""
        ...

    def refresh_masters(self) -> None:
        """Make the master weights from parameters that were just written from outside."""
        ...


class Engine(Protocol):
    """Trains one module. All data ranks call every method, in the same order."""

    @property
    def module(self) -> torch.nn.Module:
        """The module that maps a micro-batch to its mean loss."""
        ...

    @property
    def optimizer(self) -> Progress:
        """Where the optimizer stands."""
        ...

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that a step takes from its iterator."""
        ...

    def train_batch(self, micro_batches: Iterator[OnDevice], *, stop_requested: bool = False) -> StepResult:
        """Take the micro-batches of one step and make it."""
        ...

    def eval_batch(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Return the mean loss of as many micro-batches as a step takes, over all data ranks; shape ()."""
        ...

    def tensors_to_save(self, *, is_writer: bool, with_optimizer: bool) -> EngineTensors:
        """Return everything a checkpoint holds; only a rank that `is_writer` may read it."""
        ...

    def tensors_to_load(self) -> EngineTensors:
        """Return what a checkpoint is copied into, in place."""
        ...

    def close(self) -> None:
        """Let go of the module."""
        ...
