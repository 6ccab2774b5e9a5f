"""This host's accelerators, as far as a launcher must know them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LocalDevices:
    """This host's accelerators as files in /dev tell, without asking a library: importing torch takes seconds.

    `visible` are the names that CUDA_VISIBLE_DEVICES allows, None where it does not say; `num_nvidia` counts all, and
    `any_accelerator` is true for other makes too.
    """

    num_nvidia: int
    any_accelerator: bool
    visible: tuple[str, ...] | None

    @property
    def num_usable(self) -> int:
        """How many a run may use; 0 where it is to run on the CPU."""
        return self.num_nvidia if self.visible is None else min(len(self.visible), self.num_nvidia)

    def names(self, slots: Sequence[int]) -> list[str]:
        """What DeepSpeed's launcher, which overwrites it, is to put into CUDA_VISIBLE_DEVICES: one for each process."""
        if self.visible is None:
            return [str(slot) for slot in slots]
        if not self.visible:
            return ["-1"] * len(slots)  # hidden devices stay hidden
        return [self.visible[slot] if slot < len(self.visible) else str(slot) for slot in slots]


def local_devices() -> LocalDevices:
    """Look for accelerators."""
    numbered = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    others = ("kfd", "dri/renderD*", "accel*", "davinci[0-9]*", "dxg")
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    return LocalDevices(
        num_nvidia=len(numbered),
        any_accelerator=bool(numbered) or any(any(Path("/dev").glob(pattern)) for pattern in others),
        visible=None if variable is None else tuple(_visible(variable)),
    )


def _visible(variable: str) -> list[str]:
    """The devices a value of CUDA_VISIBLE_DEVICES names: those before the first that is none."""
    names: list[str] = []
    for name in variable.split(","):
        if name.strip() in ("", "-1"):
            break
        names.append(name.strip())
    return names
