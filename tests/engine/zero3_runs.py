"""Small decoders trained through the arguments, with ZeRO 3 and ZeRO 0 alike, on the ranks of a gloo group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.data.micro_batch import MicroBatch
from megatron.engine.results import StepResult
from megatron.engine.surface import Engine
from megatron.mpu.grid import build_grid
from megatron.neox_arguments.arguments import load_flat
from megatron.training import setup
from megatron.training.checkpoints import Checkpoints

# Odd sizes: with two ranks every run of a parameter but the first is padded.
FLAT: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 45,
    "num_attention_heads": 3,
    "seq_length": 8,
    "padded_vocab_size": 63,
    "pos_emb": "learned",
    "no_weight_tying": True,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "tokenizer_type": "CharLevelTokenizer",
    "data_path": "none",
    "train_iters": 20,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}},
    "gradient_clipping": 0.5,
    "warmup": 0.1,
    "lr_decay_style": "cosine",
}
# Nothing is small enough to stay whole, and several buckets are reduced.
ZERO_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5000}}


@dataclass
class SmallRun:
    """An engine and its checkpoints, as the arguments describe them."""

    engine: Engine
    checkpoints: Checkpoints
    accumulation: int

    @classmethod
    def build(cls, **settings: Any) -> SmallRun:
        args = load_flat({**FLAT, **settings}, world_size=dist.get_world_size())
        grid = build_grid(pipe_parallel_size=1, model_parallel_size=1)
        model = setup._build_model(args, grid)
        engine = setup._build_engine(args, model, grid)
        checkpoints = Checkpoints(
            args.checkpoint, args.model, args.model.padded_vocab_size, model.decoder, engine, grid, torch.device("cpu")
        )
        return cls(engine, checkpoints, args.training.gradient_accumulation_steps)

    def steps(self, first: int, last: int) -> list[dict[str, float | None]]:
        """Make the steps first .. last and return what they report."""
        return [self._row(self.engine.train_batch(self._batches(step))) for step in range(first, last + 1)]

    def evaluate(self) -> float:
        return float(self.engine.eval_batch(self._batches(1000)))

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights, whole. Collective."""
        weights = self.engine.tensors_to_save(is_writer=True, with_optimizer=False).weights
        return {name: weight.detach().clone() for name, weight in weights.items()}

    def _batches(self, step: int) -> Iterator[MicroBatch]:
        return iter([_batch(step, index) for index in range(self.accumulation)])

    @staticmethod
    def _row(result: StepResult) -> dict[str, float | None]:

        return {
            "loss": float(result.loss),
            "norm": float(result.grad_norm),
            "rate": result.learning_rate,
            "scale": result.loss_scale,
            "skipped": float(result.skipped),
        }


def _batch(step: int, micro_batch: int) -> MicroBatch:
    """Tokens that follow each other by a rule that can be learned, another sequence for each rank and micro-batch."""
    seed = 1000 * step + 10 * micro_batch + dist.get_rank()
    first = torch.randint(63, (2, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (first + 5 * torch.arange(9)) % 63
    return MicroBatch(tokens[:, :-1], tokens[:, 1:], torch.ones(2, 8))


def column(rows: list[dict[str, float | None]], name: str) -> list[float | None]:
    return [row[name] for row in rows]
