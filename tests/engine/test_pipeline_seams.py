"""Contract line 38 for DeepSpeed's pipeline engine: taken over where we think it is, and nobody else is touched."""

import os
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron.engine.one_stage import OneStage
from megatron.engine.pipeline import PipelineStage, StageEngine
from megatron.mpu.grid import build_grid
from tests.distributed.ranks import run_ranks
from tests.engine.stage_engine import batch_of, stage_engine, step_batches

pytestmark = pytest.mark.distributed
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "steps_per_print": 10**9}


def _noted(calls, name):
    """Replace the method `name` of the class by one that notes its call."""
    original = getattr(StageEngine, name)

    def noting(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    setattr(StageEngine, name, noting)


def _calls_of_a_step(rank):
    calls = []
    ours = ("run_backward", "leave_to_reducer", "finish_and_update")
    theirs = ("_exec_backward_pass", "_exec_optimizer_step", "_exec_reduce_grads", "_exec_reduce_tied_grads")
    for name in (*ours, *theirs, "allreduce_gradients"):
        _noted(calls, name)
    engine, _ = stage_engine(pipe=2, tied=True, accumulation=2)
    engine.eval_batch(step_batches(1, 0, 2))
    evaluated = list(calls)
    engine.train_batch(step_batches(1, 0, 2))
    return evaluated, calls, type(engine._executor._engine) is StageEngine


def test_contract_38_a_step_runs_our_instructions_and_deepspeed_reduces_nothing():
    for evaluated, calls, swapped in run_ranks(2, _calls_of_a_step):
        assert swapped and evaluated == []
        backward = ["run_backward", "_exec_backward_pass"]
        assert calls == [
            *(backward + backward),
            *("leave_to_reducer", "leave_to_reducer", "finish_and_update", "_exec_optimizer_step"),
        ]


def _second_engine(rank):
    own, own_map = dict(vars(PipelineEngine)), dict(PipelineEngine._INSTRUCTION_MAP)
    engine, grid = stage_engine(pipe=2, accumulation=2)
    module = PipelineModule(
        [LayerSpec(torch.nn.Linear, 2, 2), LayerSpec(torch.nn.Linear, 2, 2)],
        topology=grid.topology,
        loss_fn=lambda outputs, labels: (outputs * labels).sum(),
        partition_method="uniform",
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    other, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=CONFIG, dist_init_required=False)
    engine.train_batch(step_batches(1, grid.data.rank, 2))
    inputs = torch.full((1, 2), float(grid.data.rank + 1))
    loss = other.train_batch(iter([(inputs, inputs)] * 2))
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    untouched = dict(vars(PipelineEngine)) == own and own_map == PipelineEngine._INSTRUCTION_MAP
    is_plain = type(other) is PipelineEngine and "_INSTRUCTION_MAP" not in vars(other)
    return untouched, is_plain, float(loss), weights


def test_contract_38_the_class_is_untouched_and_a_second_pipeline_reduces_by_itself():
    results = run_ranks(4, _second_engine)
    for untouched, is_plain, loss, _ in results:
        assert untouched and is_plain and loss == results[0][2]
    for first, second in ((0, 1), (2, 3)):  # data ranks of a stage, which saw different inputs
        assert all(torch.equal(*pair) for pair in zip(results[first][3], results[second][3], strict=True))


class _RankLayers(torch.nn.Module):
    """A stage whose weights say which rank made them."""

    def __init__(self, rank):
        super().__init__()
        self.stage = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.constant_(self.stage.weight, float(rank))

    def loss(self, outputs, targets):
        return outputs.sum()


def _broadcasts(rank, sizes):
    found = []
    for pipe, tensor in sizes:
        grid = build_grid(pipe_parallel_size=pipe, model_parallel_size=tensor)
        module = _RankLayers(rank)
        executor = (OneStage if pipe == 1 else PipelineStage)(module, grid, CONFIG)
        shell = executor._shell if pipe == 1 else executor._engine
        found.append((float(module.stage.weight[0, 0]), grid.data.ranks[0], shell.dp_world_size, grid.data.size))
    return found


def test_weights_are_broadcast_within_the_data_ranks_of_one_stage_and_tensor_rank():
    # The grids of earlier engines must not count for later ones, so the sizes go up and down.
    for per_grid in run_ranks(4, _broadcasts, [(2, 1), (1, 1), (1, 2), (1, 4), (2, 2), (4, 1), (1, 1)]):
        for weight, first_data_rank, deepspeed_size, size in per_grid:
            assert weight == first_data_rank
            assert deepspeed_size == size


def _compiled_extensions(rank, folder):
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    stage_engine(pipe=2, accumulation=2)
    return [path.name for path in Path(folder).rglob("*")]


def test_no_deepspeed_op_is_compiled_and_nothing_is_printed(tmp_path, capfd):
    assert run_ranks(2, _compiled_extensions, str(tmp_path)) == [[], []]
    assert "SEED_LAYERS" not in capfd.readouterr().out


def _memory_after_a_step(rank):
    engine, _ = stage_engine(pipe=2, accumulation=2)
    engine.train_batch(step_batches(1, 0, 2))
    pipeline = engine._executor._engine
    held = [buffer for buffer in pipeline.pipe_buffers["outputs"] if buffer is not None]
    return len(held), pipeline.loss.requires_grad, pipeline._config.pipeline["pipe_partitioned"]


def test_no_graph_and_no_logits_are_kept_after_a_step():
    assert run_ranks(2, _memory_after_a_step) == [(0, False, False)] * 2


def _rehearsal_is_local(rank):
    """Only one rank runs it: it would hang if it waited for another."""
    engine, _ = stage_engine(pipe=2, tied=True)
    if rank == 0:
        return float(engine._executor.rehearsal_loss(batch_of(1, 0, 0)).detach())
    return 0.0


def test_a_rehearsal_sends_and_receives_nothing():
    assert run_ranks(2, _rehearsal_is_local, timeout_s=60)[0] != 0.0
