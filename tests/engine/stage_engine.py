"""An engine over one pipeline stage of a small decoder, on the ranks of an initialised gloo group."""

from __future__ import annotations

import torch

from megatron.data.micro_batch import MicroBatch
from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.engine.build import ReductionSettings, build_engine
from megatron.engine.stages import stage_specs
from megatron.model.decoder import Decoder
from megatron.mpu.grid import build_grid
from megatron.optimizer.choice import UpdateRule
from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.training.language_model import LanguageModel
from tests.model.small import VOCAB_SIZE, model_args, specs

BATCH, SEQUENCE = 2, 8


def batch_of(step, micro_batch, data_rank, *, length=SEQUENCE):
    generator = torch.Generator().manual_seed(10000 * step + 100 * micro_batch + data_rank)
    tokens = torch.randint(VOCAB_SIZE, (BATCH, length + 1), generator=generator)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:], torch.ones(BATCH, length))


def stage_engine(
    *, pipe=1, tied=False, overlap=True, accumulation=1, dtype=torch.float32, recompute=False, method="uniform"
):
    """Return an engine and its grid."""
    grid = build_grid(pipe_parallel_size=pipe, model_parallel_size=1)
    args = model_args(no_weight_tying=not tied, checkpoint_activations=recompute, hidden_size=24, num_layers=3)
    mine = stage_specs(specs(args), method, stage=grid.pipe.rank, num_stages=pipe)
    engine = build_engine(
        LanguageModel(Decoder(mine)),
        grid=grid,
        deepspeed_config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": accumulation,
            "steps_per_print": 10**9,
        },
        dtype=dtype,
        reduction=ReductionSettings(overlap, ReductionArithmetic(), bucket_elements=2000),
        update=UpdateRule(
            name="adamw",
            schedule=LearningRateSchedule(1e-2, 0.0, 2, 100, "cosine"),
            loss_scale=None,
            max_norm=0.0,
            weight_decay=0.01,
            eps=1e-5,
        ),
        rehearsal_batch=batch_of(0, 0, 0),
    )
    return engine, grid


def step_batches(step, data_rank, accumulation, **shape):
    return iter([batch_of(step, micro_batch, data_rank, **shape) for micro_batch in range(accumulation)])


def weights_of(engine):
    return {
        name.removeprefix("decoder."): parameter.detach().clone()
        for name, parameter in engine.module.named_parameters()
    }


def train(rank, num_steps, options):
    """Train and return the losses and this stage's weights by the decoder's names."""
    engine, grid = stage_engine(**options)
    accumulation = options.get("accumulation", 1)
    losses = [
        float(engine.train_batch(step_batches(step, grid.data.rank, accumulation)).loss)
        for step in range(1, num_steps + 1)
    ]
    engine.optimizer.settle()
    weights = weights_of(engine)
    engine.close()
    return losses, weights
