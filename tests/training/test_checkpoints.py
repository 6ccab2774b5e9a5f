"""From the engine's view of a stage to the whole model's names and back."""

from types import SimpleNamespace

import pytest
import torch

from megatron.checkpointing import SaveRole
from megatron.engine.surface import EngineTensors
from megatron.errors import CheckpointError
from megatron.model.decoder import Decoder
from megatron.neox_arguments.checkpoint import CheckpointArgs
from megatron.optimizer.progress import OptimizerProgress
from megatron.training import checkpoints
from megatron.training.checkpoints import Checkpoints, check_loadable
from megatron.training.language_model import LanguageModel
from megatron.training.state import TrainState
from tests.checkpointing.grid_runs import roles_in_turn
from tests.checkpointing.runs import same_bits
from tests.model.small import model_args, specs

EMBEDDING = "layers.0.word_embeddings.weight"


class StubOptimizer:
    """State by the engine's names, all of it or the runs in `shards`."""

    def __init__(self, module, shards=None, value=1.0):
        self.shards = shards
        self.progress = OptimizerProgress(4, 1, {"value": 8.0})
        self.restored = None
        self.state = {
            name: {"exp_avg": self.part(name, torch.full_like(weight, value)), "step": torch.tensor(value)}
            for name, weight in module.named_parameters()
            if shards is None or name in shards
        }

    def part(self, name, tensor):
        return tensor if self.shards is None else tensor.flatten()[self.shards[name].start : self.shards[name].stop]

    def restore_progress(self, progress):
        self.restored = progress


def stage_of(folder, stages, index, shards=None, value=1.0, seed=0, **fields):
    args = model_args(no_weight_tying=False, **fields)
    first, last = stages[index]
    decoder = Decoder(specs(args, seed=seed)[first:last])
    module = LanguageModel(decoder)
    axis = SimpleNamespace(rank=0, size=1)
    grid = SimpleNamespace(
        pipe=SimpleNamespace(rank=index, size=len(stages)), data=axis, tensor=axis, world_size=len(stages)
    )
    optimizer = StubOptimizer(module, shards, value)
    tensors = EngineTensors(dict(module.named_parameters()), optimizer.state)
    engine = SimpleNamespace(
        module=module, optimizer=optimizer, tensors_to_save=lambda **_: tensors, tensors_to_load=lambda: tensors
    )
    folders = CheckpointArgs(save=str(folder), load=str(folder))
    return Checkpoints(folders, args, 11, decoder, engine, grid, torch.device("cpu"))


def save_stages(monkeypatch, folder, stages):
    """What each stage would save, saved by one process."""
    contents = []
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.dist, "get_rank", lambda: 0)
        patch.setattr(checkpoints, "save", lambda root, snapshot, **_: contents.append(snapshot))
        for stage in stages:
            stage.save(TrainState(5, 40))
    roles = [
        SaveRole.of_rank(rank, len(stages), content.holding.position, sharded_state=content.holding.shards is not None)
        for rank, content in enumerate(contents)
    ]
    roles_in_turn(folder, contents, roles)
    return contents


ONE, TWO = [(0, 5)], [(0, 2), (2, 5)]


def test_a_tied_head_on_its_own_stage_is_the_embedding(monkeypatch, tmp_path):
    stages = [stage_of(tmp_path, TWO, index) for index in (0, 1)]
    contents = save_stages(monkeypatch, tmp_path, stages)
    assert EMBEDDING in contents[0].weights and EMBEDDING in contents[1].weights
    assert contents[1].holding.layers == [2, 3, 4]
    assert not any(name.startswith("layers.4.") for name in contents[1].weights)
    assert not list((tmp_path / "global_step5").glob("*layer_004*"))

    whole = stage_of(tmp_path, ONE, 0, value=0.0, seed=1)
    state, random_state = whole.load()
    assert (state.iteration, state.consumed_train_samples) == (5, 40)
    assert whole.engine.optimizer.restored == OptimizerProgress(4, 1, {"value": 8.0})
    assert random_state is not None
    for stage in stages:
        names = stage.decoder.model_names()
        for name, weight in stage.decoder.named_parameters():
            assert same_bits(weight, dict(whole.decoder.named_parameters())[names[name]])
    assert all((tensor == 1).all() for state in whole.engine.optimizer.state.values() for tensor in state.values())


def test_runs_of_a_tied_weight_come_from_both_stages(monkeypatch, tmp_path):
    tied = ["decoder.layers.0.word_embeddings.weight", "decoder.layers.4.final_linear.weight"]
    stages = []
    for index, halves in enumerate([slice(0, 7), slice(7, None)]):
        module = stage_of(tmp_path, TWO, index).engine.module
        shards = {name: range(weight.numel()) for name, weight in module.named_parameters()}
        shards[tied[index]] = range(dict(module.named_parameters())[tied[index]].numel())[halves]
        stages.append(stage_of(tmp_path, TWO, index, shards, value=1.0 + index))
    save_stages(monkeypatch, tmp_path, stages)
    # A counter cannot be two things at once, which is what the stages' different values would make of it.
    whole = stage_of(tmp_path, ONE, 0, value=0.0)
    with pytest.raises(CheckpointError, match=f"{EMBEDDING}/step"):
        whole.load()
    for stage in stages:
        for state in stage.engine.optimizer.state.values():
            state["step"].fill_(3)
    save_stages(monkeypatch, tmp_path, stages)
    whole.load()
    tensor = whole.engine.optimizer.state[tied[0]]["exp_avg"].flatten()
    assert torch.equal(tensor[:7], torch.ones(7)) and (tensor[7:] == 2).all()


def test_what_cannot_be_loaded_is_refused_without_a_model(monkeypatch, tmp_path):
    save_stages(monkeypatch, tmp_path, [stage_of(tmp_path, ONE, 0)])
    args = CheckpointArgs(load=str(tmp_path))
    same = model_args(no_weight_tying=False)
    check_loadable(args, same, vocab_size=11)
    with pytest.raises(CheckpointError, match="no_weight_tying was False and is True"):
        check_loadable(args, model_args(no_weight_tying=True), vocab_size=11)
    check_loadable(CheckpointArgs(), same, vocab_size=11)
