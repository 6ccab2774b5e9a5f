import json
import logging
import random

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron.checkpointing import (
    GridPosition,
    Holding,
    LoadOptions,
    RandomState,
    RunState,
    find_checkpoint,
    load_checkpoint,
    open_checkpoint,
)
from megatron.errors import CheckpointError
from tests.checkpointing.runs import (
    MODEL,
    blank,
    blank_state,
    optimizer_state,
    same_bits,
    save_alone,
    weights,
)


def load_into_blank(root, **arguments):
    tensors, state = blank(weights()), blank_state(optimizer_state())
    loaded = load_checkpoint(root, weights=tensors, optimizer_state=state, model=MODEL, **arguments)
    return loaded, tensors, state


def test_comes_back_bit_for_bit(tmp_path):
    unusual = {name: tensor.clone() for name, tensor in weights(3).items()}
    for tensor in unusual.values():
        tensor.view(-1)[:4] = torch.tensor([float("nan"), -0.0, float("inf"), 6e-8])
    save_alone(tmp_path, 3, weights=unusual)
    loaded, tensors, state = load_into_blank(tmp_path)
    assert all(same_bits(tensors[name], unusual[name]) for name in unusual)
    for name, saved in optimizer_state(3).items():
        assert state[name].keys() == saved.keys()
        assert all(same_bits(state[name][key], saved[key]) for key in saved)
    assert loaded.run_state == RunState(3, 24, 2, 1, {"value": 65536.0, "clean_steps": 7})
    assert loaded.optimizer_restored


def test_other_readers_see_the_same_tensors(tmp_path):
    directory = save_alone(tmp_path, 2)
    files = sorted(path.name for path in directory.glob("layer_*"))
    assert files == ["layer_000.safetensors", "layer_001.safetensors", "layer_010.safetensors"]
    found = {name: tensor for file in files for name, tensor in load_file(directory / file).items()}
    assert all(same_bits(found[name], tensor) for name, tensor in weights(2).items())
    with safe_open(directory / "optimizer_layer_010.safetensors", framework="np") as file:
        exp_avg = file.get_tensor("layers.10.norm.weight/exp_avg")
    np.testing.assert_array_equal(exp_avg, optimizer_state(2)["layers.10.norm.weight"]["exp_avg"].numpy())


def test_transformers_reads_a_layer(tmp_path):
    from transformers.modeling_utils import load_state_dict

    directory = save_alone(tmp_path, 2)
    state = load_state_dict(str(directory / "layer_001.safetensors"), map_location="cpu")
    assert same_bits(state["layers.1.dense.weight"], weights(2)["layers.1.dense.weight"])


def test_manifest_says_what_there_is(tmp_path):
    directory = save_alone(tmp_path, 5)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["iteration"] == 5
    assert manifest["model"] == MODEL
    assert manifest["parallel_sizes"] == {"pp": 1, "tp": 1, "dp": 1}
    assert manifest["bucket_plan"][0] == ["layers.10.norm.weight"]
    assert manifest["libraries"]["torch"] == torch.__version__
    listed = {entry["name"]: entry["size_bytes"] for entry in manifest["files"]}
    on_disk = {path.name: path.stat().st_size for path in directory.iterdir() if path.name != "manifest.json"}
    assert listed == on_disk
    assert (tmp_path / "latest").read_text() == "global_step5\n"


def test_finetune_takes_weights_only(tmp_path):
    save_alone(tmp_path, 3)
    loaded, tensors, state = load_into_blank(tmp_path, options=LoadOptions(finetune=True))
    assert loaded.run_state == RunState()
    assert not loaded.optimizer_restored
    assert loaded.random_state is None
    assert same_bits(tensors["layers.1.dense.bias"], weights(3)["layers.1.dense.bias"])
    assert not any(tensor.any() for tensors in state.values() for tensor in tensors.values())


def test_no_load_optim_keeps_iteration_and_data_position(tmp_path):
    save_alone(tmp_path, 3)
    loaded, _, state = load_into_blank(tmp_path, options=LoadOptions(no_load_optim=True, no_load_rng=True))
    assert (loaded.run_state.iteration, loaded.run_state.consumed_train_samples) == (3, 24)
    assert (loaded.run_state.num_updates, loaded.run_state.loss_scale) == (0, {})
    assert not loaded.optimizer_restored
    assert loaded.random_state is None
    assert not state["layers.1.dense.bias"]["master"].any()


def test_saved_without_optimizer_or_random_state(tmp_path):
    save_alone(tmp_path, 3, optimizer_state=None, random_state=None)
    with pytest.raises(CheckpointError, match="no_load_optim: true"):
        load_into_blank(tmp_path)
    with pytest.raises(CheckpointError, match="no_load_rng: true"):
        load_into_blank(tmp_path, options=LoadOptions(no_load_optim=True))
    loaded, _, _ = load_into_blank(tmp_path, options=LoadOptions(no_load_optim=True, no_load_rng=True))
    assert loaded.run_state.iteration == 3


def test_optimizer_without_state_tensors(tmp_path):
    stateless = {name: {} for name in weights()}
    save_alone(tmp_path, 1, optimizer_state=stateless)
    loaded = load_checkpoint(tmp_path, weights=blank(weights()), optimizer_state=stateless)
    assert loaded.optimizer_restored


def test_nothing_to_load_starts_from_scratch(tmp_path, caplog):
    assert find_checkpoint(tmp_path / "absent") is None
    with caplog.at_level(logging.INFO):
        assert load_checkpoint(tmp_path / "absent", weights={}) is None
    assert len(caplog.records) == 1
    assert "no checkpoint under" in caplog.text


def test_asked_iteration(tmp_path):
    for iteration in (1, 2):
        save_alone(tmp_path, iteration)
    loaded, tensors, _ = load_into_blank(tmp_path, iteration=1)
    assert loaded.run_state.iteration == 1
    assert same_bits(tensors["layers.1.dense.bias"], weights(1)["layers.1.dense.bias"])
    with pytest.raises(CheckpointError, match=r"global_step7 does not exist.*global_step2"):
        load_into_blank(tmp_path, iteration=7)


def test_cast_is_said(tmp_path, caplog):
    save_alone(tmp_path, 1)
    target = {name: tensor.float() for name, tensor in blank(weights()).items()}
    load_checkpoint(tmp_path, weights=target)
    assert "torch.bfloat16 to torch.float32" in caplog.text
    assert torch.equal(target["layers.0.word_embeddings.weight"], weights(1)["layers.0.word_embeddings.weight"].float())


def draw(generator):
    return (torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(3).tolist(),
            np.random.randn(), torch.rand(2, generator=generator).tolist())  # fmt: skip


def test_random_numbers_continue(tmp_path):
    generator = torch.Generator().manual_seed(5)
    random.gauss(0, 1), np.random.randn()  # leave a second Gaussian number in both caches
    save_alone(tmp_path, 1, random_state=RandomState.capture({"dropout": generator}))
    expected = draw(generator)
    assert draw(generator) != expected
    loaded, _, _ = load_into_blank(tmp_path)
    loaded.random_state.restore({"dropout": generator})
    assert draw(generator) == expected


def test_data_rank_the_run_did_not_have(tmp_path, caplog):
    directory = save_alone(tmp_path, 1)
    with caplog.at_level(logging.WARNING):
        loaded, _, _ = load_into_blank(tmp_path, holding=Holding(GridPosition(data_rank=1)))
    assert "data rank 1" in caplog.text
    reader = open_checkpoint(directory)
    state = reader.random_state(reader.random_source(GridPosition()))
    states = [state.torch_cpu, loaded.random_state.torch_cpu, state.derived(2).torch_cpu]
    assert not torch.equal(states[0], states[1])
    assert not torch.equal(states[1], states[2])
    loaded.random_state.restore()
