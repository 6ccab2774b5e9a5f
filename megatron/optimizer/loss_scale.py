"""Loss scales for fp16: small gradients are lifted into its range before backward and put back before the update.

Micikevicius et al., Mixed Precision Training, 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class LossScale(Protocol):
    """What the loss is multiplied by before backward."""

    @property
    def value(self) -> float:
        """The scale in force for the next backward."""
        ...

    def update(self, *, overflowed: bool) -> bool:
        """Take note of whether the step just made had a gradient that was not finite; say whether the scale moved."""
        ...

    def state(self) -> dict[str, float]:
        """Return what `restore` needs to go on from here."""
        ...

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a state saved earlier."""
        ...


@dataclass
class ConstantLossScale:
    """A scale that never moves."""

    value: float

    def update(self, *, overflowed: bool) -> bool:
        """Never move."""
        return False

    def state(self) -> dict[str, float]:
        """Return nothing: a constant has no state."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Keep the configured constant, whatever was saved."""


@dataclass
class DynamicLossScale:
    """Halve the scale on overflow, double it after `window` steps without one.

    `hysteresis` is the number of overflows that are forgiven before the scale moves; it is replenished when the scale
    grows. The scale never falls below `minimum`.
    """

    value: float
    window: int
    hysteresis: int
    minimum: float

    def __post_init__(self) -> None:
        self._forgiven_left = self.hysteresis
        self._clean_steps = 0

    def update(self, *, overflowed: bool) -> bool:
        """Move the scale after a step, if it is time; say whether it moved."""
        before = self.value
        if overflowed:
            self._overflow()
        else:
            self._clean_step()
        return self.value != before

    def _overflow(self) -> None:
        self._clean_steps = 0
        if self._forgiven_left > 1:
            self._forgiven_left -= 1
        else:
            self.value = max(self.value / 2.0, self.minimum)

    def _clean_step(self) -> None:
        self._clean_steps += 1
        if self._clean_steps % self.window == 0:
            self._forgiven_left = self.hysteresis
            self.value *= 2.0

    def state(self) -> dict[str, float]:
        """Return the scale and its counters."""
        return {"value": self.value, "forgiven_left": self._forgiven_left, "clean_steps": self._clean_steps}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a saved scale; a checkpoint of another precision has none and leaves this one as configured."""
        if state:
            self.value = state["value"]
            self._forgiven_left = int(state["forgiven_left"])
            self._clean_steps = int(state["clean_steps"])
