"""Small valid configurations, and the public ones where they are at hand."""

from pathlib import Path

from megatron.neox_arguments import NeoXArgs, load_flat

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "facts"

SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "optimizer": {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "train_iters": 100,
    "train_micro_batch_size_per_gpu": 4,
}


def load(world_size: int = 1, **changes: object) -> NeoXArgs:
    """Load the small configuration with changes; a value of None takes the key out."""
    flat = {key: value for key, value in {**SMALL, **changes}.items() if value is not None}
    return load_flat(flat, world_size=world_size)
