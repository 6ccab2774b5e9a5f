"""Validation and test losses, over the same samples every time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.data.loader import MicroBatchLoader
from megatron.engine.surface import Engine
from megatron.monitor.record import ValidationRecord
from megatron.monitor.sink import Sinks


@dataclass(frozen=True)
class Evaluation:
    """Evaluates splits by name. A split without data has no loader and is left out."""

    engine: Engine
    sinks: Sinks
    loaders: Mapping[str, MicroBatchLoader | None]

    def run(self, split: str, iteration: int) -> float | None:
        """Write a validation row with the mean loss over the whole split; None if it has no data.

        Collective over all ranks.
        """
        loader = self.loaders[split]
        if loader is None:
            return None
        micro_batches = iter(loader)
        losses = [self.engine.eval_batch(micro_batches) for _ in range(len(loader) // self.engine.num_micro_batches)]
        loss = float(torch.stack(losses).mean())
        self.sinks.validation(ValidationRecord.of_loss(iteration, split, loss))
        return loss
