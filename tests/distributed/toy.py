"""A small model with every awkward kind of parameter, and a trainer that drives the reducer as the engine does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from megatron.data_parallel.agreement import check_ranks_agree, parameter_lines
from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.data_parallel.grad_reducer import GradReducer
from megatron.data_parallel.param_gather import ParameterGather
from megatron.data_parallel.partition import ReductionGroup, plan_buckets
from megatron.data_parallel.ready_order import (
    agree_on_order,
    complete_ready_order,
    record_ready_order,
)
from megatron.data_parallel.roll_call import RollCall
from megatron.optimizer.global_norm import GlobalNorm
from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.optimizer.loss_scale import LossScale
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer, UpdateOutcome
from megatron.optimizer.weights import cast_parameters, shard_weights

VOCABULARY, HIDDEN = 64, 24


class ToyModel(nn.Module):
    """Embedding, three blocks, head. Registered in an order that is not the order of use.

    Has a transposed, an empty and a 0-dim parameter, one that is never used and one that is frozen.
    """

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.last = nn.Linear(HIDDEN, HIDDEN)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.norm = nn.LayerNorm(HIDDEN)
        self.transposed = nn.Parameter(torch.empty(HIDDEN, HIDDEN + 1).t())
        self.empty = nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.empty(()))
        self.unused = nn.Parameter(torch.empty(5))
        self.frozen = nn.Parameter(torch.empty(HIDDEN), requires_grad=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.frozen
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        hidden = hidden + (hidden @ self.transposed.t())[..., :HIDDEN] * self.scale + self.empty.sum()
        return self.head(torch.tanh(self.last(self.norm(hidden))))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of predicting each token from the one before; shape () in fp32."""
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(step: int, micro_batch: int, rank: int, *, size: int = 2) -> torch.Tensor:
    """Tokens of one micro-batch: the same for the same arguments, different for others. Shape (size, 9)."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    return torch.randint(VOCABULARY, (size, 9), generator=generator)


@dataclass
class Options:
    """How to train the toy; pickled to the ranks."""

    overlap: bool = True
    accumulation: int = 1
    dtype: torch.dtype = torch.float32
    bucket_elements: int = 700
    arithmetic: ReductionArithmetic = field(default_factory=ReductionArithmetic)
    tied: bool = False
    max_norm: float = 0.5
    learning_rate: float = 1e-2
    check_for_nan: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    zero_stage: int = 0
    overlap_param_gather: bool = False


class Trainer:
    """What the engine does around a reducer, without DeepSpeed."""

    def __init__(
        self,
        options: Options,
        *,
        model: nn.Module | None = None,
        loss_scale: LossScale | None = None,
        rehearse: bool = True,
        loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
        roll_call: RollCall | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.options = options
        self.loss_of = loss_of
        self.model = model if model is not None else ToyModel(tied=options.tied)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        handle = dist.new_group(timeout=timeout) if timeout is not None else dist.group.WORLD
        self.group = ReductionGroup("data", self.size, self.size, self.rank, handle if self.size > 1 else None)
        named = dict(self.model.named_parameters())
        weights = cast_parameters(named, options.dtype)
        self.parameters = {name: parameter for name, parameter in named.items() if name in weights.masters}
        self.plan = self._plan(rehearse)
        self.reducer = GradReducer(
            named,
            self.plan,
            arithmetic=options.arithmetic,
            overlap=options.overlap,
            scatter_every_backward=options.zero_stage >= 2,
            check_for_nan=options.check_for_nan,
            roll_call=roll_call,
        )
        self.gather = ParameterGather(
            named, self.plan, overlapped_by=self.model if options.overlap_param_gather else None
        )
        weights = shard_weights(weights, self.gather)
        self.optimizer = MixedPrecisionOptimizer(
            weights,
            self.reducer,
            inner=options.optimizer(list(weights.masters.values()), fused=True),
            schedule=LearningRateSchedule(options.learning_rate, 0.0, 2, 100, "cosine"),
            loss_scale=loss_scale,
            max_norm=options.max_norm,
            norm=GlobalNorm(
                next(self.model.parameters()).device, group=self.group.handle if options.zero_stage else None
            ),
            gather=self.gather,
        )

    def _plan(self, rehearse: bool):
        order = list(reversed(self.parameters))
        if rehearse:
            with record_ready_order(self.parameters) as seen:
                self.loss_of(self.model, tokens_of(0, 0, 0)).backward()
            order = complete_ready_order(seen, self.parameters)
        check_ranks_agree({"the parameters": parameter_lines(self.parameters)}, self.group.handle)
        order = agree_on_order(order, self.group.handle)
        plan = plan_buckets(
            order,
            self.parameters,
            lambda _: self.group,
            bucket_elements=self.options.bucket_elements,
            sharded=self.options.zero_stage >= 1,
        )
        check_ranks_agree({"the gradient buckets": plan.lines()}, self.group.handle)
        return plan

    def backward(self, step: int, after_backward: Callable[[int], None] | None = None) -> float:
        """Run all micro-batches of a step, boundary included, without finishing the reduction."""
        self.reducer.begin_step(self.options.accumulation)
        total = 0.0
        for micro_batch in range(self.options.accumulation):
            loss = self.loss_of(self.model, tokens_of(step, micro_batch, self.rank)) / self.options.accumulation
            with self.reducer.backward_pass():
                self.optimizer.scale_loss(loss).backward()
            total += float(loss.detach())
            if after_backward is not None:
                after_backward(micro_batch)
        return total

    def step(self, step: int) -> tuple[float, UpdateOutcome]:
        loss = self.backward(step)
        self.reducer.finish()
        return loss, self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        self.gather.wait()
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def train(rank: int, options: Options, num_steps: int = 4, loss_scale: LossScale | None = None):
    """Train the toy; return its weights and, for each step, (loss, norm, rate, scale, skipped)."""
    trainer = Trainer(options, loss_scale=loss_scale)
    rows = []
    for step in range(1, num_steps + 1):
        loss, outcome = trainer.step(step)
        rows.append((loss, float(outcome.grad_norm), outcome.learning_rate, outcome.loss_scale, float(outcome.skipped)))
    trainer.optimizer.settle()
    return trainer.weights(), rows


def assert_same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), f"{name} differs"
