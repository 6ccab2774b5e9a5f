"""An engine over one pipeline stage of a small decoder, on the ranks of an initialised gloo group."""

from __future__ import annotations

import torch

from megatron.data.micro_batch import MicroBatch
from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.engine.build import build_engine
from megatron.engine.reduction_settings import ReductionSettings
from megatron.engine.stages import stage_specs
from megatron.model.decoder import Decoder, decoder_layers
from megatron.mpu.grid import build_grid
from megatron.mpu.tensor_parallel import TensorParallel
from megatron.optimizer.choice import UpdateRule
from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.training.language_model import LanguageModel
from tests.model.small import VOCAB_SIZE, model_args

BATCH, SEQUENCE = 2, 8
SHAPE = {"hidden_size": 24, "num_layers": 3}


def batch_of(step, micro_batch, data_rank, *, length=SEQUENCE):
    generator = torch.Generator().manual_seed(10000 * step + 100 * micro_batch + data_rank)
    tokens = torch.randint(VOCAB_SIZE, (BATCH, length + 1), generator=generator)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:], torch.ones(BATCH, length))


def stage_engine(
    *,
    pipe=1,
    tensor=1,
    sequence=False,
    zero_stage=0,
    tied=False,
    overlap=True,
    accumulation=1,
    dtype=torch.float32,
    recompute=False,
    method="uniform",
    loss_scale=None,
    max_norm=0.5,
    eps=1e-5,
    fields=None,
    num_proving_steps=0,
    rule="adamw",
    learning_rate=1e-2,
    decay="cosine",
    bucket_elements=2000,
    delay_on_later_stages=False,
    prepare=None,
):
    """Return an engine and its grid. `prepare(model, grid)` may change the model before the engine takes it."""
    grid = build_grid(pipe_parallel_size=pipe, model_parallel_size=tensor)
    args = model_args(no_weight_tying=not tied, checkpoint_activations=recompute, **{**SHAPE, **(fields or {})})
    tensor_parallel = TensorParallel(grid.tensor.rank, tensor, grid.tensor.handle, sequence)
    layers = decoder_layers(args, seed=7, tensor_parallel=tensor_parallel)
    mine = stage_specs(layers, method, stage=grid.pipe.rank, num_stages=pipe)
    model = LanguageModel(Decoder(mine), tensor_parallel)
    if prepare is not None:
        prepare(model, grid)
    engine = build_engine(
        model,
        grid=grid,
        deepspeed_config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": accumulation,
            "steps_per_print": 10**9,
        },
        dtype=dtype,
        reduction=ReductionSettings(
            overlap,
            ReductionArithmetic(),
            zero_stage=zero_stage,
            bucket_elements=bucket_elements,
            num_proving_steps=num_proving_steps,
            overlap_param_gather=overlap and zero_stage > 0,
            delay_on_later_stages=delay_on_later_stages,
        ),
        update=UpdateRule(
            name=rule,
            schedule=LearningRateSchedule(learning_rate, 0.0, 2, 100, decay),
            loss_scale=loss_scale,
            max_norm=max_norm,
            weight_decay=0.01,
            eps=eps,
        ),
        rehearsal_batch=batch_of(0, 0, 0),
    )
    return engine, grid


def step_batches(step, data_rank, accumulation, **shape):
    return iter([batch_of(step, micro_batch, data_rank, **shape) for micro_batch in range(accumulation)])


def weights_of(engine):
    return {
        name.removeprefix("decoder."): parameter.detach().clone()
        for name, parameter in engine.tensors_to_load().weights.items()
    }


def train(rank, num_steps, options):
    """Train and return losses followed by norms, and this stage's weights by the decoder's names."""
    engine, grid = stage_engine(**options)
    accumulation = options.get("accumulation", 1)
    results = [engine.train_batch(step_batches(step, grid.data.rank, accumulation)) for step in range(1, num_steps + 1)]
    engine.optimizer.settle()
    weights = weights_of(engine)
    engine.close()
    return [float(r.loss) for r in results] + [float(r.grad_norm) for r in results], weights
