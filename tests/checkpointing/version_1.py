"""Writes checkpoints as the first version of the format was: frozen, and independent of what writes them now."""

import json
import zlib

from safetensors.torch import save_file

from megatron.checkpointing import RandomState


def write_checkpoint(root, iteration, weights, optimizer_state, model):
    """Whole tensors, a file a layer and kind; a manifest that says nothing of what is in them."""
    directory = root / f"global_step{iteration}"
    directory.mkdir(parents=True)
    by_file = {}
    for name, tensor in weights.items():
        layer = int(name.split(".")[1])
        by_file.setdefault(f"layer_{layer:03d}", {})[name] = tensor
        states = {f"{name}/{key}": state for key, state in optimizer_state[name].items()}
        by_file.setdefault(f"optimizer_layer_{layer:03d}", {}).update(states)
    by_file["random_rank_000"] = RandomState.from_seed(3).to_tensors()
    for file, tensors in by_file.items():
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, directory / f"{file}.safetensors", {"format": "pt"})
    state = {
        "iteration": iteration,
        "consumed_train_samples": 8 * iteration,
        "num_updates": iteration,
        "skipped_iterations": 0,
        "loss_scale": {"value": 512.0},
    }
    (directory / "state.json").write_text(json.dumps(state))
    content = {
        "iteration": iteration,
        "files": [file_entry(path) for path in sorted(directory.iterdir())],
        "model": model,
        "parallel_sizes": {"pp": 1, "tp": 1, "dp": 1},
        "bucket_plan": None,
        "libraries": {},
        "format_version": 1,
    }
    content = {"checksum": checksum(encode(content)), **content}
    (directory / "manifest.json").write_bytes(encode(content))
    (root / "latest").write_text(f"{directory.name}\n")
    return directory


def file_entry(path):
    return {"name": path.name, "size_bytes": path.stat().st_size, "checksum": checksum(path.read_bytes())}


def checksum(content):
    return f"crc32:{zlib.crc32(content):08x}"


def encode(content):
    return (json.dumps(content, indent=1) + "\n").encode()
