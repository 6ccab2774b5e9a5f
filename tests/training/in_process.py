"""Whole runs on the ranks of an initialised gloo group: real arguments, the real training code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.data_parallel.roll_call import RollCall
from megatron.launch.environment import RankInfo
from megatron.neox_arguments import NeoXArgs, load_args
from megatron.training.join_ranks import JoinedRank
from megatron.training.setup import Run, set_up
from megatron.training.signals import StopSignals
from tests.training.runs import ROOT, SMOKE


@dataclass
class Trained:
    """What a rank saw of a run: (loss, norm, rate, scale, skipped) of its steps, and losses of splits at the end."""

    rows: list[tuple[float | None, ...]] = field(default_factory=list)
    evaluated: dict[str, float] = field(default_factory=dict)

    @property
    def losses(self) -> list[float | None]:
        return [row[0] for row in self.rows]


def smoke_args(settings: Mapping[str, object]) -> NeoXArgs:
    """The smoke configuration's arguments with `settings`."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_args([ROOT / SMOKE], overrides=overrides, world_size=dist.get_world_size())


def set_up_run(settings: Mapping[str, object]) -> Run:
    """Build the run; collective over all ranks."""
    args = smoke_args(settings)
    rank = RankInfo(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), "", 0, "a test")
    timeout = timedelta(seconds=args.parallelism.distributed_timeout_seconds)
    roll_call = RollCall.within(timeout.total_seconds(), dist.HashStore())
    return set_up(args, rank, JoinedRank(torch.device("cpu"), timeout, roll_call), StopSignals())


def train_run(settings: Mapping[str, object]) -> Trained:
    """Train to the end and evaluate, as `megatron.training.run` does."""
    run, seen = set_up_run(settings), Trained()
    if run.random_state is not None:
        run.random_state.restore()
    train_batch = run.engine.train_batch

    def noted(*args: object, **options: object) -> object:
        result = train_batch(*args, **options)
        values = (result.loss, result.grad_norm, result.learning_rate, result.loss_scale, result.skipped)
        seen.rows.append(tuple(None if value is None else float(value) for value in values))
        return result

    run.engine.train_batch = noted
    run.loop.run(run.state)
    for split in ("valid", "test"):
        loss = run.evaluation.run(split, run.state.iteration)
        if loss is not None:
            seen.evaluated[split] = loss
    run.engine.close()
    return seen


def train_runs(rank: int, runs: Sequence[Mapping[str, object]]) -> list[Trained]:
    """Train one after the other, in the same processes: starting them takes longer than training."""
    return [train_run(settings) for settings in runs]


def stages(pipe: int, **settings: object) -> dict[str, object]:
    """Settings of `pipe` stages on four ranks, for the same eight samples a step, with a tied head."""
    return {
        "hidden_dropout": 0.0,
        "no_weight_tying": False,
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2 * max(pipe, 1),
        "pipe_parallel_size": pipe,
        **settings,
    }


def assert_close(trained: Trained, expected: Trained) -> None:
    """Check that two runs are the same to rounding."""
    assert len(trained.rows) == len(expected.rows)
    for row, expected_row in zip(trained.rows, expected.rows, strict=True):
        assert row[0] == pytest.approx(expected_row[0], rel=1e-5)
        assert row[1] == pytest.approx(expected_row[1], rel=1e-3)
        assert row[2:] == expected_row[2:]
    assert trained.evaluated == pytest.approx(expected.evaluated, rel=1e-5)
