"""The executor of a model that is one stage: gradient accumulation is the one-stage schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.engine.executor import GradientPath, mean_loss
from megatron.engine.shell import deepspeed_grid, initialize_shell
from megatron.engine.surface import OnDevice
from megatron.mpu.grid import ParallelGrid


class OneStage:
    """Runs a module that maps a micro-batch to its mean loss. Collective over the world when it is made."""

    can_go_on_after_error = True

    def __init__(self, module: torch.nn.Module, grid: ParallelGrid, deepspeed_config: Mapping[str, Any]) -> None:
        self._shell, self._seam = initialize_shell(module, deepspeed_config, deepspeed_grid(grid))
        self._gradients: GradientPath | None = None
        self.module = module
        self.device: torch.device = self._shell.device
        self.num_micro_batches: int = self._shell.gradient_accumulation_steps()

    def connect(self, gradients: GradientPath) -> None:
        """Send the gradients of every `run` on this path."""
        self._gradients = gradients
        self._seam.connect(gradients.on_reduced)

    def rehearsal_loss(self, micro_batch: OnDevice) -> torch.Tensor:
        """Return the loss of a synthetic micro-batch."""
        loss: torch.Tensor = self.module(micro_batch.to(self.device))
        return loss

    def run(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Forward, backward and DeepSpeed's step for each micro-batch; the last one reduces and updates."""
        assert self._gradients is not None, "the executor ran before a gradient path was connected"
        self._shell.train()
        losses = []
        for index in range(self.num_micro_batches):
            loss = self._shell(next(micro_batches).to(self.device))
            with self._gradients.backward_pass():
                self._shell.backward(self._gradients.scale_loss(loss))
            if index == self.num_micro_batches - 1:
                self._gradients.finish()
            self._shell.step()
            losses.append(loss.detach())
        return mean_loss(losses, self.device)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Return the mean loss of as many micro-batches as `run` takes."""
        self._shell.eval()
        losses = [self.module(next(micro_batches).to(self.device)) for _ in range(self.num_micro_batches)]
        return mean_loss(losses, self.device)

    def close(self) -> None:
        """Let DeepSpeed clean up after itself."""
        self._shell.destroy()
