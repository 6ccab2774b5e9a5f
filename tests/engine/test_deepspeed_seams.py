"""Contract line 38: DeepSpeed is taken over where we think it is, and nobody else is touched."""

import os
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.engine.shell import ShellEngine, initialize_shell
from tests.distributed.ranks import run_ranks
from tests.engine.toy_engine import ToyLoss, micro_batches, toy_engine

pytestmark = pytest.mark.distributed
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3, "steps_per_print": 10**9}


def _calls_of_a_step(rank):
    """Record what DeepSpeed calls in one step of three micro-batches."""
    shell, seam = initialize_shell(torch.nn.Linear(2, 2), CONFIG)
    calls = []
    shell.allreduce_gradients = lambda *_: calls.append("reduce")
    seam.connect(lambda: calls.append("update"))
    for index in range(3):
        shell.backward(shell(torch.ones(1, 2)).sum())
        calls.append(f"backward {index}")
        gradient_kept = shell.module.weight.grad is not None
        shell.step()
        calls.append(f"step {index}")
    return calls, gradient_kept, shell.module.weight.grad is None, type(shell) is ShellEngine


def test_contract_38_deepspeed_would_reduce_in_our_place_and_updates_once_at_the_boundary():
    for calls, kept, dropped, swapped in run_ranks(2, _calls_of_a_step):
        assert calls == [
            *("reduce", "backward 0", "step 0", "reduce", "backward 1", "step 1"),
            *("reduce", "backward 2", "update", "step 2"),
        ]
        assert kept and dropped and swapped


def _second_engine(rank):
    own = dict(vars(DeepSpeedEngine))
    engine = toy_engine()
    import deepspeed

    module = torch.nn.Linear(2, 2)
    other, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        config={**CONFIG, "gradient_accumulation_steps": 1},
        dist_init_required=False,
    )
    engine.train_batch(micro_batches(1, rank))
    other.backward(other(torch.full((1, 2), float(rank))).sum())
    return (
        type(other) is DeepSpeedEngine,
        dict(vars(DeepSpeedEngine)) == own,
        other.module.weight.grad.mean().item(),
    )


def test_contract_38_the_class_is_untouched_and_a_second_engine_reduces_by_itself():
    for plain, untouched, mean in run_ranks(2, _second_engine):
        assert plain and untouched
        assert mean == pytest.approx(0.5)


def _compiled_extensions(rank, folder):
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    initialize_shell(torch.nn.Linear(2, 2), CONFIG)
    return [path.name for path in Path(folder).rglob("*")]


def test_no_deepspeed_op_is_compiled(tmp_path):
    assert run_ranks(1, _compiled_extensions, str(tmp_path)) == [[]]


def _gradients_are_ours(rank):
    shell, _ = initialize_shell(ToyLoss(), {**CONFIG, "gradient_accumulation_steps": 1})
    return [parameter.dtype for parameter in shell.module.parameters()], shell.gradient_clipping()


def test_the_shell_neither_casts_nor_clips():
    for dtypes, clipping in run_ranks(1, _gradients_are_ours):
        assert set(dtypes) == {torch.float32} and clipping == 0.0
