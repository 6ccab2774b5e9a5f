import json
import shutil

import pytest
import torch

from megatron.checkpointing import Holding, load_checkpoint, open_checkpoint
from megatron.errors import CheckpointError
from tests.checkpointing.runs import MODEL, blank, blank_state, optimizer_state, save_alone, weights

FILES = (
    "manifest.json",
    "state.json",
    "layer_001.safetensors",
    "optimizer_layer_010.safetensors",
    "random_rank_000.safetensors",
)


def refused(root, **arguments):
    """The message of the refusal; nothing may have been touched."""
    tensors = {name: torch.full_like(tensor, 3) for name, tensor in weights().items()}
    arguments = {"weights": tensors, "optimizer_state": blank_state(optimizer_state()), "model": MODEL} | arguments
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(root, **arguments)
    assert all((tensor == 3).all() for tensor in tensors.values())
    return str(refusal.value)


@pytest.fixture
def two_steps(tmp_path):
    save_alone(tmp_path, 1)
    return save_alone(tmp_path, 2)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bit_anywhere(two_steps, name):
    whole = (two_steps / name).read_bytes()
    for position in range(0, len(whole), max(1, len(whole) // 7)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        (two_steps / name).write_bytes(damaged)
        message = refused(two_steps.parent)
        assert name in message
        assert "write global_step1 into" in message
    (two_steps / name).write_bytes(whole)
    load_checkpoint(two_steps.parent, weights=blank(weights()))


@pytest.mark.parametrize("name", FILES)
def test_truncated(two_steps, name):
    whole = (two_steps / name).read_bytes()
    (two_steps / name).write_bytes(whole[: len(whole) // 2])
    assert name in refused(two_steps.parent)


@pytest.mark.parametrize("name", FILES)
def test_missing(two_steps, name):
    (two_steps / name).unlink()
    message = refused(two_steps.parent)
    assert name in message
    assert "global_step1" in message


def test_all_missing_files_in_one_message(two_steps):
    for name in FILES[2:]:
        (two_steps / name).unlink()
    message = refused(two_steps.parent)
    assert all(name in message for name in FILES[2:])


def test_suggestion_skips_what_is_damaged_too(two_steps):
    root = two_steps.parent
    save_alone(root, 3)
    (root / "global_step3" / "state.json").unlink()
    file = two_steps / "layer_000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert "write global_step1 into" in refused(root)
    shutil.rmtree(root / "global_step1")
    assert "no other complete checkpoint" in refused(root)


def test_latest_names_nothing(two_steps):
    latest = two_steps.parent / "latest"
    latest.write_text("global_step9\n")
    assert "global_step9 does not exist" in refused(two_steps.parent)
    latest.write_bytes(b"\xff\x00nonsense")
    assert "latest holds" in refused(two_steps.parent)


def test_checkpoint_of_another_trainer(tmp_path):
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (tmp_path / "latest").write_text("global_step4")
    assert "another trainer" in refused(tmp_path)


def test_newer_format(two_steps):
    path = two_steps / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    assert "format version 99" in refused(two_steps.parent)


def test_other_model_values_by_name(two_steps):
    message = refused(two_steps.parent, model=MODEL | {"hidden_size": 8, "pos_emb": "alibi", "new_in_this_version": 1})
    assert "hidden_size was 4 and is 8" in message
    assert "pos_emb was 'rotary' and is 'alibi'" in message
    assert "new_in_this_version" not in message


def test_names_and_shapes_in_one_message(two_steps):
    tensors = {name: torch.full_like(tensor, 3) for name, tensor in weights().items()}
    del tensors["layers.1.dense.bias"]
    tensors["layers.1.dense.weight"] = torch.full((4, 5), 3.0)
    tensors["layers.2.extra"] = torch.full((1,), 3.0)
    message = refused(two_steps.parent, weights=tensors)
    assert "missing in the checkpoint: layers.2.extra" in message
    assert "not in this model: layers.1.dense.bias" in message
    assert "layers.1.dense.weight (saved [4, 4], here [4, 5])" in message


def test_optimizer_of_another_kind(two_steps):
    state = blank_state(optimizer_state())
    for tensors in state.values():
        tensors["momentum"] = tensors.pop("exp_avg_sq")
    message = refused(two_steps.parent, optimizer_state=state)
    assert "layers.1.dense.bias/momentum" in message
    assert "layers.1.dense.bias/exp_avg_sq" in message


def test_a_stage_checks_and_reads_its_own_layers(two_steps):
    damaged = two_steps / "layer_000.safetensors"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    mine = {name: tensor for name, tensor in blank(weights()).items() if name.startswith("layers.1.")}
    load_checkpoint(two_steps.parent, weights=mine, holding=Holding(layers=[1]))
    assert torch.equal(mine["layers.1.dense.bias"], weights(2)["layers.1.dense.bias"])
    with pytest.raises(CheckpointError, match="layer_000"):
        open_checkpoint(two_steps).verify()


def test_a_last_stage_takes_a_tied_weight_from_the_first(tmp_path):
    position = {"layers.0.position_embeddings.weight": torch.ones(2, 4)}
    save_alone(tmp_path, 1, weights=weights() | position)
    tied, norm = "layers.0.word_embeddings.weight", "layers.10.norm.weight"
    mine = {name: tensor for name, tensor in blank(weights()).items() if name in (tied, norm)}
    load_checkpoint(tmp_path, weights=mine, holding=Holding(layers=[10, 11]))
    assert torch.equal(mine[tied], weights()[tied])
    assert "layers.0.position" in refused(tmp_path, weights=mine, holding=Holding(layers=[0, 10]))
    file = tmp_path / "global_step1" / "layer_000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match="layer_000"):
        load_checkpoint(tmp_path, weights=mine, holding=Holding(layers=[10, 11]))
