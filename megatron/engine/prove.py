"""`prove_overlap_steps`: the first steps made both ways, to see that overlap changes no bit.

A step is made three times from the same weights, the same micro-batches and the same random streams: twice with the
reduction after backward, then with it under backward, and only then the parameters are updated. The first two tell
whether the model's own backward gives the same bits twice, which on an accelerator it may not; only if it does can the
third say something about the reduction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice

import torch
import torch.distributed as dist

from megatron.data_parallel.grad_reducer import GradReducer
from megatron.engine.executor import Executor, GradientPath
from megatron.engine.random_streams import kept_random_state
from megatron.engine.surface import OnDevice
from megatron.errors import DivergenceError

_log = logging.getLogger(__name__)

Gradients = dict[str, torch.Tensor]


class OverlapProof:
    """Proves the steps it is asked to run. All ranks of the world make the same calls."""

    def __init__(self, num_steps: int, reducer: GradReducer, gradients: GradientPath) -> None:
        self.steps_left = num_steps
        self._num_proven = 0
        self._reducer = reducer
        self._path = gradients

    def run(self, executor: Executor, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Make one step as `executor.run` does, and two before it that are compared with it and change nothing.

        Collective over the world. Raises DivergenceError, naming the first parameter, when overlap changes a gradient
        that is the same twice without it.
        """
        batches = list(islice(micro_batches, executor.num_micro_batches))
        self._reducer.overlap = False
        with kept_random_state():
            first = self._gradients_of(executor, batches)
        with kept_random_state():
            again = self._gradients_of(executor, batches)
        self._reducer.overlap = True

        def compare_and_update() -> None:
            self._say(first, again, self._reducer.gradients())
            self._path.update()

        loss = self._run(executor, batches, compare_and_update)
        self.steps_left -= 1
        return loss

    def _gradients_of(self, executor: Executor, batches: list[OnDevice]) -> Gradients:
        """Return copies of the reduced gradients of a step that updates nothing."""
        kept: Gradients = {}

        def keep() -> None:
            kept.update({name: gradient.clone() for name, gradient in self._reducer.gradients().items()})
            self._reducer.release()

        self._run(executor, batches, keep)
        return kept

    def _run(self, executor: Executor, batches: list[OnDevice], then: Callable[[], None]) -> torch.Tensor:
        self._reducer.begin_step(executor.num_micro_batches)
        with self._path.when_reduced(then):
            return executor.run(iter(batches))

    def _say(self, first: Gradients, again: Gradients, overlapped: Gradients) -> None:
        """Log what the comparison showed on all ranks together."""
        here = (_first_difference(first, again), _first_difference(first, overlapped))
        found: list[tuple[str | None, str | None] | None] = [here]
        if dist.is_initialized() and dist.get_world_size() > 1:
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, here)
        not_repeated = [f"{pair[0]} on rank {rank}" for rank, pair in enumerate(found) if pair and pair[0]]
        changed = [f"{pair[1]} on rank {rank}" for rank, pair in enumerate(found) if pair and pair[1]]
        self._num_proven += 1
        if not_repeated:
            _log.warning(
                "prove_overlap_steps: nothing is shown by step %d, since backward itself does not give the same bits "
                "twice; the first gradient that differs is %s",
                self._num_proven,
                not_repeated[0],
            )
        elif changed:
            raise DivergenceError(
                f"prove_overlap_steps: in step {self._num_proven} overlap_grad_reduce changed gradients that are the "
                f"same twice without it; the first is {changed[0]}"
            )
        else:
            _log.info(
                "prove_overlap_steps: step %d, %d gradients on each of %d ranks, bit for bit the same under backward "
                "and after it",
                self._num_proven,
                len(first),
                len(found),
            )


def _first_difference(left: Gradients, right: Gradients) -> str | None:
    """Return the first parameter whose gradients are not the same bits, NaN included."""
    for name, gradient in left.items():
        if not torch.equal(_bits(gradient), _bits(right[name])):
            return name
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
