"""One cell of the matrix of parallelism, precision and memory savings: its training, and plain torch's beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache

import torch

from megatron.model.decoder import Decoder
from megatron.model.loss import lm_loss
from megatron.optimizer.loss_scale import DynamicLossScale
from tests.engine.stage_engine import SHAPE, batch_of, stage_engine, step_batches, weights_of
from tests.model.small import model_args, specs

NUM_STEPS = 8
MAX_NORM = 0.5
# Adam divides by eps where a gradient vanishes: with a small one rounding there becomes a full update.
EPS = 1e-3
FIELDS = {"num_attention_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 64, "pos_emb": "learned"}


@dataclass(frozen=True)
class Cell:
    """A way to train the same model on the same batches. `dtype` is torch's name of one."""

    zero: int = 0
    pipe: int = 1
    tensor: int = 1
    sequence: bool = False
    data: int = 1
    dtype: str = "float32"
    accumulation: int = 1
    tied: bool = False
    recompute: bool = False

    @property
    def world_size(self) -> int:
        return self.pipe * self.tensor * self.data

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in asdict(self).items())


LEVELS = {
    "zero": (0, 1, 2),
    "pipe": (1, 2),
    "tensor, sequence": ((1, False), (2, False), (2, True)),
    "dtype": ("float32", "bfloat16", "float16"),
    "accumulation": (1, 4),
    "tied": (False, True),
    "recompute": (False, True),
    "data": (1, 2, 3, 4),
}


def all_cells() -> Iterator[Cell]:
    """Every combination that four ranks can run."""
    for values in itertools.product(*LEVELS.values()):
        named = dict(zip(LEVELS, values, strict=True))
        tensor, sequence = named.pop("tensor, sequence")
        cell = Cell(tensor=tensor, sequence=sequence, **named)
        if cell.world_size <= 4:
            yield cell


def pairwise_cells() -> list[Cell]:
    """Few cells in which every two values that can meet do meet, chosen greedily and always the same."""
    candidates = list(all_cells())
    missing = set().union(*map(_pairs, candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda cell: len(_pairs(cell) & missing))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


# Three things at once that have gone wrong together in public trainers, in the precision that shows it best.
MORE_CELLS = [
    Cell(zero=0, pipe=2, data=2, accumulation=4, tied=True),
    Cell(zero=2, pipe=2, data=2, accumulation=4, tied=True, recompute=True),
    Cell(zero=1, pipe=2, tensor=2, sequence=True, accumulation=4, tied=True),
    Cell(zero=0, pipe=2, tensor=2, sequence=True, tied=True, recompute=True),
]


@cache
def _pairs(cell: Cell) -> frozenset[tuple[tuple[str, object], tuple[str, object]]]:
    values = asdict(cell)
    values["tensor, sequence"] = (values.pop("tensor"), values.pop("sequence"))
    return frozenset(itertools.combinations(sorted(values.items(), key=lambda item: item[0]), 2))


@dataclass
class Outcome:
    """What a rank reports of a run: rows (loss, norm, rate, scale, skipped), weights, and its communication."""

    rows: list[tuple[float | None, ...]]
    weights: dict[str, torch.Tensor]
    launched_in_backward: int
    launches: int
    bytes_sent: int
    gradient_elements: dict[str, tuple[int, int]]
    """By reduction group: its size, and the elements this rank has in it."""


def train_cell(cell: Cell, *, overlap: bool) -> Outcome:
    """Train on the ranks of the initialised world, which has as many as the cell needs."""
    options = {key: value for key, value in asdict(cell).items() if key != "data"}
    dtype = getattr(torch, options.pop("dtype"))
    options["zero_stage"] = options.pop("zero")
    scale = DynamicLossScale(2.0**8, window=3, hysteresis=1, minimum=1.0) if dtype is torch.float16 else None
    engine, grid = stage_engine(
        **options, overlap=overlap, dtype=dtype, loss_scale=scale, max_norm=MAX_NORM, eps=EPS, fields=FIELDS
    )
    reducer = engine._reducer
    launched_in_backward, finish = [0], reducer.finish

    def counted_finish():
        launched_in_backward[0] = len(reducer.collectives)
        finish()

    reducer.finish = counted_finish
    rows = []
    for step in range(1, NUM_STEPS + 1):
        result = engine.train_batch(step_batches(step, grid.data.rank, cell.accumulation))
        row = (result.loss, result.grad_norm, result.learning_rate, result.loss_scale, result.skipped)
        rows.append(tuple(None if value is None else float(value) for value in row))
    elements: dict[str, tuple[int, int]] = {}
    for bucket in reducer._buckets:
        size, count = elements.get(bucket.plan.group.name, (bucket.plan.group.size, 0))
        elements[bucket.plan.group.name] = size, count + sum(slot.numel for slot in bucket.plan.slots)
    outcome = Outcome(
        rows,
        weights_of(engine),
        launched_in_backward[0],
        len(reducer.collectives),
        sum(times.bytes_sent for times in reducer.collectives),
        elements,
    )
    engine.close()
    return outcome


def train_cells(rank: int, cells: Iterable[Cell]) -> list[tuple[Outcome, Outcome]]:
    """Train each cell with overlap and without."""
    return [(train_cell(cell, overlap=True), train_cell(cell, overlap=False)) for cell in cells]


@cache
def plain_torch(data: int, accumulation: int, tied: bool) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train the whole model in fp32 with nothing but torch; return (loss, norm) of each step and the weights."""
    model = Decoder(specs(model_args(no_weight_tying=not tied, **{**SHAPE, **FIELDS})))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, eps=EPS, foreach=False)
    rates = [1e-2 * min(1.0, step / 2) for step in range(1, NUM_STEPS + 1)]
    rows = []
    for step, warm_rate in enumerate(rates, start=1):
        optimizer.zero_grad()
        total = 0.0
        for rank, micro_batch in itertools.product(range(data), range(accumulation)):
            batch = batch_of(step, micro_batch, rank)
            loss = lm_loss(model(batch.tokens_BS), batch.labels_BS, batch.loss_mask_BS) / (data * accumulation)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = _cosine(step) if step > 2 else warm_rate
        optimizer.step()
        rows.append((total, float(norm)))
    return rows, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _cosine(step: int) -> float:
    """The rate after a warmup of 2 in a decay of 100 from 1e-2 to 0."""
    return 1e-2 * 0.5 * (1.0 + float(torch.cos(torch.tensor(torch.pi * (step - 2) / 98, dtype=torch.float64))))
