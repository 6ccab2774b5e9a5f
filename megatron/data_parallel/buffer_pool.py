"""Flat buffers of gradients, used again from step to step."""

from __future__ import annotations

import torch


class BufferPool:
    """Flat buffers to be used again: memory that was touched before costs no page faults."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat buffer; zeros when it is new, whatever was in it when it is not."""
        free = self._free.get((num_elements, dtype))
        return free.pop() if free else torch.zeros(num_elements, dtype=dtype, device=self._device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Hand a buffer back that no collective uses any more."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        """Free what is not in use."""
        self._free.clear()
