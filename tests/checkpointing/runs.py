"""A small run to save and load: three layers, every dtype, optimizer tensors that are views of one flat buffer."""

from dataclasses import replace

import torch

from megatron.checkpointing import RandomState, RunState, SaveRole, Snapshot, save

ALONE = SaveRole.of_rank(0, 1)
MODEL = {"num_layers": 1, "hidden_size": 4, "pos_emb": "rotary"}


def weights(iteration=1):
    generator = torch.Generator().manual_seed(iteration)
    return {
        "layers.0.word_embeddings.weight": torch.randn(8, 4, generator=generator).to(torch.bfloat16),
        "layers.1.dense.weight": torch.randn(4, 4, generator=generator).to(torch.float16),
        "layers.1.dense.bias": torch.randn(4, generator=generator),
        "layers.10.norm.weight": torch.randn(4, generator=generator).t(),
    }


def optimizer_state(iteration=1):
    names = {name: tensor.numel() for name, tensor in weights().items()}
    flat = torch.randn(3, sum(names.values()), generator=torch.Generator().manual_seed(100 + iteration))
    state = {}
    start = 0
    for name, size in names.items():
        rows = flat[:, start : start + size]
        moments = {"exp_avg": rows[1], "exp_avg_sq": rows[2].abs()}
        state[name] = {"master": rows[0], **moments, "step": torch.tensor(iteration)}
        start += size
    return state


def snapshot(iteration=1, **changes):
    content = Snapshot(
        weights=weights(iteration),
        run_state=RunState(iteration, 8 * iteration, iteration - 1, 1, {"value": 65536.0, "clean_steps": 7}),
        optimizer_state=optimizer_state(iteration),
        random_state=RandomState.from_seed(iteration),
        model=MODEL,
        bucket_plan=[["layers.10.norm.weight"], ["layers.1.dense.weight", "layers.1.dense.bias"]],
    )
    return replace(content, **changes)


def save_alone(root, iteration, *, retention=None, **changes):
    return save(root, snapshot(iteration, **changes), role=ALONE, agree=bool, retention=retention)


def blank(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def blank_state(state):
    return {name: blank(tensors) for name, tensors in state.items()}


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
    )
