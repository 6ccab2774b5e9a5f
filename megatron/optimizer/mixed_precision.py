"""The update: averaged gradients in, new parameters out.

Unscale, check for overflow, global norm, clip, update of the fp32 master weights, copy to the training dtype. The
reducer hands over each gradient when the reduction has finished; DeepSpeed calls `step` at the end of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.data_parallel.grad_reducer import GradReducer
from megatron.errors import ConfigError, DivergenceError
from megatron.optimizer.global_norm import clip_factor, global_norm
from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.optimizer.loss_scale import LossScale

_log = logging.getLogger(__name__)

# An update that overflows this many times in a row, with nothing left that the loss scale could do about it, has
# diverged: going on would only burn machines.
MAX_SKIPPED_IN_A_ROW = 50


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


@dataclass(frozen=True)
class OptimizerProgress:
    """Where the optimizer stands: what a checkpoint keeps of it besides tensors."""

    num_updates: int
    num_skipped: int
    loss_scale: Mapping[str, float]


def master_weights(parameters: Mapping[str, torch.nn.Parameter], dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    """Cast `parameters` to `dtype` in place and return the fp32 weights that the optimizer updates.

    For fp32 these are the parameters themselves; otherwise copies that keep the bits the cast drops. Frozen
    parameters are cast too and have no master.

    Raises ConfigError for a parameter that leaves gaps in memory, which fused kernels would read.
    """
    masters: dict[str, torch.nn.Parameter] = {}
    for name, parameter in parameters.items():
        if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
            raise ConfigError(f"parameter {name} does not fill its memory (strides {list(parameter.stride())})")
        if parameter.dtype == dtype:
            master = parameter
        else:
            master = torch.nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
            parameter.data = parameter.detach().to(dtype)
        if parameter.requires_grad:
            masters[name] = master
    return masters


class MixedPrecisionOptimizer:
    """One torch optimizer over fp32 master weights, fed by a `GradReducer`.

    Whether an update was skipped is known on the device at once and on the host only when it is needed, at the next
    step: `settle` reads it then, so that no step waits for its own outcome.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        masters: Mapping[str, torch.nn.Parameter],
        reducer: GradReducer,
        *,
        inner: torch.optim.Optimizer,
        schedule: LearningRateSchedule,
        loss_scale: LossScale | None,
        max_norm: float,
    ) -> None:
        self._masters = dict(masters)
        self._copies = [
            (parameters[name], master) for name, master in masters.items() if parameters[name] is not master
        ]
        self._parameters = {name: parameters[name] for name in masters}
        self._reducer = reducer
        self._inner = inner
        self._schedule = schedule
        self._loss_scale = loss_scale
        self._max_norm = max_norm
        self._num_updates = 0
        self._num_skipped = 0
        self._skipped_in_a_row = 0
        self._unsettled: torch.Tensor | None = None
        self._allocate_state()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward on."""
        self.settle()
        return loss if self._loss_scale is None else loss * self._loss_scale.value

    @torch.no_grad()
    def step(self) -> UpdateOutcome:
        """Update the parameters with the reducer's gradients, or leave everything as it is if they are not finite.

        The reduction must have finished. Every rank that holds a copy of a parameter gets the same bits.
        """
        self.settle()
        scale = None if self._loss_scale is None else self._loss_scale.value
        gradients = self._reducer.gradients()
        norm = global_norm(gradients.values()) / (scale or 1.0)
        skipped = 1.0 - torch.isfinite(norm).float()
        # A norm that is not finite has no clip factor; what the kernel would do with it is undone by found_inf.
        divisor = (scale or 1.0) / clip_factor(norm.nan_to_num(), self._max_norm)
        learning_rate = self._schedule.at(self._num_updates + 1)
        self._update(gradients, learning_rate, divisor, skipped)
        self._reducer.release()
        self._unsettled = skipped
        return UpdateOutcome(norm, skipped, learning_rate, scale)

    def _update(
        self, gradients: dict[str, torch.Tensor], learning_rate: float, divisor: torch.Tensor, skipped: torch.Tensor
    ) -> None:
        """Run the inner optimizer, which divides the gradients and honours `skipped` inside its kernel."""
        for name, master in self._masters.items():
            master.grad = gradients[name]
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        amp: Any = self._inner
        amp.grad_scale, amp.found_inf = divisor, skipped
        self._inner.step()
        for parameter, master in self._copies:
            parameter.copy_(master)
            master.grad = None

    @torch.no_grad()
    def _allocate_state(self) -> None:
        """Have the inner optimizer make its state now, so that a checkpoint can be read into it.

        A step that overflows allocates everything and changes nothing.
        """
        zeros = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        device = next(iter(zeros.values())).device
        self._update(zeros, 0.0, torch.ones((), device=device), torch.ones((), device=device))
        for master in self._masters.values():
            master.grad = None

    def settle(self) -> None:
        """Learn on the host what became of the last step, and move counters and loss scale accordingly.

        Raises DivergenceError when the gradients have not been finite for MAX_SKIPPED_IN_A_ROW steps.
        """
        if self._unsettled is None:
            return
        overflowed, self._unsettled = bool(self._unsettled), None
        scale_moved = self._loss_scale is not None and self._loss_scale.update(overflowed=overflowed)
        if not overflowed:
            self._num_updates += 1
            self._skipped_in_a_row = 0
            return
        self._num_skipped += 1
        self._skipped_in_a_row += 1
        scale = "" if self._loss_scale is None else f", loss scale now {self._loss_scale.value:g}"
        # On every rank alike, so rank 0, the only one to show this level, speaks for all.
        _log.info("gradients were not finite: update skipped, %d so far%s", self._num_skipped, scale)
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW and not scale_moved:
            raise DivergenceError(
                f"gradients have not been finite for {self._skipped_in_a_row} steps in a row{scale}: training has "
                "diverged"
            )

    @property
    def progress(self) -> OptimizerProgress:
        """Counters and loss scale after the last step."""
        self.settle()
        return OptimizerProgress(
            self._num_updates, self._num_skipped, {} if self._loss_scale is None else self._loss_scale.state()
        )

    def restore_progress(self, progress: OptimizerProgress) -> None:
        """Go on from a checkpoint's counters and loss scale."""
        self._unsettled = None
        self._num_updates, self._num_skipped = progress.num_updates, progress.num_skipped
        if self._loss_scale is not None:
            self._loss_scale.restore(progress.loss_scale)

    def named_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return each parameter's optimizer state by name, `master` included where it is not the parameter itself.

        The tensors are the live ones, to be read or written in place. Shapes are the parameter's, but for 0-dim
        counters.
        """
        self.settle()
        state: dict[str, dict[str, torch.Tensor]] = {}
        for name, master in self._masters.items():
            state[name] = {key: value for key, value in self._inner.state[master].items() if torch.is_tensor(value)}
            if master is not self._parameters[name]:
                state[name]["master"] = master.detach()
        return state

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Make the master weights from parameters that were just written from outside, as a load of weights does."""
        for parameter, master in self._copies:
            master.copy_(parameter)
