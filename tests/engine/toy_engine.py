"""An engine over the toy model of tests/distributed, on the ranks of an initialised gloo group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.engine.build import build_engine
from megatron.engine.reduction_settings import ReductionSettings
from megatron.mpu.grid import build_grid
from megatron.optimizer.choice import UpdateRule
from megatron.optimizer.learning_rate import LearningRateSchedule
from tests.distributed.toy import ToyModel, loss_of, tokens_of


@dataclass(frozen=True)
class Tokens:
    """A micro-batch of the toy."""

    tokens: torch.Tensor

    def to(self, device: torch.device) -> Tokens:
        return Tokens(self.tokens.to(device))


class ToyLoss(torch.nn.Module):
    """Maps a micro-batch to its loss, as the engine wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ToyModel()
        # DeepSpeed broadcasts weights as bytes, and views none that is transposed or 0-dim in that way.
        self.model.transposed = torch.nn.Parameter(self.model.transposed.detach().contiguous())
        self.model.scale = torch.nn.Parameter(self.model.scale.detach().reshape(1))

    def forward(self, micro_batch: Tokens) -> torch.Tensor:
        return loss_of(self.model, micro_batch.tokens)


def micro_batches(step, rank, accumulation=1):
    return iter([Tokens(tokens_of(step, micro_batch, rank)) for micro_batch in range(accumulation)])


def toy_engine(*, overlap=True, accumulation=1, dtype=torch.float32, loss_scale=None, module=None):
    grid = build_grid(pipe_parallel_size=1, model_parallel_size=1)
    return build_engine(
        module or ToyLoss(),
        grid=grid,
        deepspeed_config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "steps_per_print": 10**9,
        },
        dtype=dtype,
        reduction=ReductionSettings(overlap, ReductionArithmetic(), bucket_elements=700),
        update=UpdateRule(
            name="adamw",
            schedule=LearningRateSchedule(1e-2, 0.0, 2, 100, "cosine"),
            loss_scale=loss_scale,
            max_norm=0.5,
            weight_decay=0.01,
        ),
        rehearsal_batch=Tokens(tokens_of(0, 0, 0)),
    )
