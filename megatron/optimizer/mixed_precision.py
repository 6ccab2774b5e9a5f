"""The update: averaged gradients in, new parameters out.

Unscale, check for overflow, global norm, clip, update of the fp32 master weights, copy to the training dtype, and where
ranks update shards, gather them. The reducer hands over each gradient when the reduction has finished; DeepSpeed calls
`step` at the end of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.data_parallel.exposure import CollectiveTimes
from megatron.data_parallel.grad_reducer import GradReducer
from megatron.data_parallel.param_gather import ParameterGather
from megatron.optimizer.global_norm import GlobalNorm, clip_factor
from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.optimizer.loss_scale import LossScale
from megatron.optimizer.progress import OptimizerProgress, StepCounter
from megatron.optimizer.weights import OwnedWeights


@dataclass(frozen=True)
class UpdateOutcome:
    """What one optimizer step did. The tensors are 0-dim and live on the device until somebody reads them.

    `grad_norm` is the norm before clipping, without the loss scale; `skipped` is 1 when the gradients were not finite
    and nothing was updated.
    """

    grad_norm: torch.Tensor
    skipped: torch.Tensor
    learning_rate: float
    loss_scale: float | None


class MixedPrecisionOptimizer:
    """One torch optimizer over the fp32 weights this rank owns, fed by a `GradReducer`.

    Whether an update was skipped is known on the device at once and on the host only when it is needed, at the next
    step: `settle` reads it then, so that no step waits for its own outcome.
    """

    def __init__(
        self,
        weights: OwnedWeights,
        reducer: GradReducer,
        *,
        inner: torch.optim.Optimizer,
        schedule: LearningRateSchedule,
        loss_scale: LossScale | None,
        max_norm: float,
        norm: GlobalNorm,
        gather: ParameterGather | None = None,
    ) -> None:
        self._weights = weights
        self._separate = weights.separate
        self._reducer = reducer
        self._norm = norm
        self._gather = gather
        self._inner = inner
        self._schedule = schedule
        self._max_norm = max_norm
        self._steps = StepCounter(loss_scale)
        self._unsettled: torch.Tensor | None = None
        self._allocate_state()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward on."""
        self.settle()
        scale = self._steps.loss_scale
        return loss if scale is None else loss * scale

    def step(self) -> UpdateOutcome:
        """Update and gather the parameters."""
        outcome = self.update()
        self.gather_parameters()
        return outcome

    @torch.no_grad()
    def update(self) -> UpdateOutcome:
        """Update what this rank owns with the reducer's gradients, or nothing if they are not finite.

        The reduction must have finished. Every rank that owns a copy of a parameter gets the same bits.
        """
        self.settle()
        scale = self._steps.loss_scale
        gradients = self._reducer.gradients()
        norm = self._norm.of(gradients, 1.0 / (scale or 1.0))
        skipped = 1.0 - torch.isfinite(norm).float()
        # A norm that is not finite has no clip factor; what the kernel would do with it is undone by found_inf.
        divisor = (scale or 1.0) / clip_factor(norm.nan_to_num(), self._max_norm)
        learning_rate = self._schedule.at(self._steps.num_updates + 1)
        self._update(gradients, learning_rate, divisor, skipped)
        self._reducer.release()
        self._unsettled = skipped
        return UpdateOutcome(norm, skipped, learning_rate, scale)

    def abandon_update(self) -> None:
        """Take part in what the other ranks do in `update`, for a step that failed here: they will skip it.

        Collective, as `update` is where ranks update shards or hold different parameters.
        """
        self._norm.spoil()

    def gather_parameters(self) -> None:
        """Give every rank what others have updated. Collective where ranks update shards; see `ParameterGather.run`."""
        if self._gather is not None:
            self._gather.run()

    def wait_for_parameters(self) -> None:
        """Wait until every parameter of this rank may be read."""
        if self._gather is not None:
            self._gather.wait()

    def close(self) -> None:
        """Leave whole parameters and no hooks behind."""
        if self._gather is not None:
            self._gather.close()

    def _update(
        self, gradients: dict[str, torch.Tensor], learning_rate: float, divisor: torch.Tensor, skipped: torch.Tensor
    ) -> None:
        """Run the inner optimizer, which divides the gradients and honours `skipped` inside its kernel."""
        for name, master in self._weights.masters.items():
            master.grad = gradients[name]
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        amp: Any = self._inner
        amp.grad_scale, amp.found_inf = divisor, skipped
        self._inner.step()
        for value, master in self._separate:
            value.copy_(master)
            master.grad = None

    @torch.no_grad()
    def _allocate_state(self) -> None:
        """Have the inner optimizer make its state now, so that a checkpoint can be read into it.

        A step that overflows allocates everything and changes nothing.
        """
        zeros = {name: torch.zeros_like(master) for name, master in self._weights.masters.items()}
        if not zeros:
            return
        device = next(iter(zeros.values())).device
        self._update(zeros, 0.0, torch.ones((), device=device), torch.ones((), device=device))
        for master in self._weights.masters.values():
            master.grad = None

    def settle(self) -> None:
        """Learn on the host what became of the last step, and move counters and loss scale accordingly.

        Raises DivergenceError when the gradients have not been finite for MAX_SKIPPED_IN_A_ROW steps.
        """
        if self._unsettled is None:
            return
        skipped, self._unsettled = bool(self._unsettled), None
        self._steps.count(skipped=skipped)

    @property
    def progress(self) -> OptimizerProgress:
        """Counters and loss scale after the last step."""
        self.settle()
        return self._steps.progress

    def restore_progress(self, progress: OptimizerProgress) -> None:
        """Go on from a checkpoint's counters and loss scale."""
        self._unsettled = None
        self._steps.restore(progress)

    @property
    def gathers(self) -> list[CollectiveTimes]:
        """When parameters were last gathered, by bucket; empty where all of them are always whole."""
        return [] if self._gather is None else self._gather.collectives

    @property
    def shards(self) -> Mapping[str, range] | None:
        """Which elements, in memory order, of each parameter this rank has the state of; None: all of every one."""
        return self._weights.runs

    def named_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return each parameter's optimizer state by name, `master` included where it is not the parameter itself.

        The tensors are the live ones, to be read or written in place. Shapes are the parameter's, or with `shards`
        those of flat runs, but for 0-dim counters.
        """
        self.settle()
        state: dict[str, dict[str, torch.Tensor]] = {}
        separate = {id(master) for _, master in self._separate}
        for name, master in self._weights.masters.items():
            tensors = {key: value for key, value in self._inner.state[master].items() if torch.is_tensor(value)}
            if id(master) in separate:
                tensors["master"] = master.detach()
            flat = self.shards is not None
            state[name] = {key: value.view(-1) if flat and value.ndim else value for key, value in tensors.items()}
        return state

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Make the master weights from parameters that were just written from outside, as a load of weights does."""
        for value, master in self._separate:
            master.copy_(value)
