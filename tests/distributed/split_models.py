"""Small decoders split over tensor ranks, and how the ranks' parts make a whole again."""

import torch
import torch.distributed as dist

from megatron.model.decoder import Decoder, decoder_layers
from megatron.model.loss import lm_loss
from megatron.mpu.tensor_parallel import NOT_SPLIT, TensorParallel, parameter_placements
from tests.model.small import model_args, tokens

SEQ_LENGTH = 16

CASES = {
    "rotary, swiglu, grouped queries": {
        "activation": "swiglu",
        "num_kv_heads": 2,
        "norm": "rmsnorm",
        "use_qk_layernorm": True,
    },
    "learned positions, gelu, biases": {"pos_emb": "learned"},
    "tied head": {"pos_emb": "learned", "no_weight_tying": False, "opt_pos_emb_offset": 2},
    "tied head without positions": {"no_weight_tying": False},
    "side by side, two norms": {"gpt_j_residual": True, "use_qk_layernorm": True},
    "side by side, one norm": {"gpt_j_residual": True, "gpt_j_tied": True, "use_bias_in_mlp": False},
    "alibi, scalenorm": {"pos_emb": "alibi", "norm": "scalenorm", "activation": "geglu"},
    "sinusoidal, window": {"pos_emb": "sinusoidal", "sliding_window_width": 5},
    "recomputed": {"checkpoint_activations": True, "pos_emb": "learned"},
}
FOUR_WAYS = {"num_attention_heads": 8, "num_kv_heads": 4, "activation": "swiglu", "pos_emb": "learned"}
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2}


def split(rank, *, sequence_parallel):
    return TensorParallel(rank, dist.get_world_size(), dist.group.WORLD, sequence_parallel)


def build(fields, tensor_parallel=NOT_SPLIT, dtype=torch.float32):
    args = model_args(**{"seq_length": SEQ_LENGTH, "init_method_std": 0.15, **fields})
    decoder = Decoder(decoder_layers(args, seed=7, tensor_parallel=tensor_parallel))
    spread_constants(decoder, tensor_parallel)
    return decoder.to(dtype)


def spread_constants(decoder, tensor_parallel):
    """Biases of zero and norms of one would hide what is added twice or not at all: give each a value by its place."""
    with torch.no_grad():
        for name, placement in parameter_placements(decoder).items():
            parameter = decoder.get_parameter(name)
            if parameter.dim() > 1:
                continue
            size = tensor_parallel.size if placement.split_dim is not None else 1
            count = size * parameter.numel()
            fused = torch.linspace(-0.5, 0.5, count).view(placement.num_fused, -1)
            parameter += tensor_parallel.shard(fused, dim=1).flatten() if size > 1 else fused.flatten()


def batch():
    rows = tokens(seq_length=SEQ_LENGTH + 1)
    mask = torch.ones(2, SEQ_LENGTH)
    mask[0, 3:6] = 0
    return rows[:, :-1], rows[:, 1:], mask


def loss_and_gradients(decoder, tensor_parallel=NOT_SPLIT, seed=0):
    """Our loss and every gradient, on this rank."""
    torch.manual_seed(seed)
    decoder.zero_grad()
    inputs, labels, mask = batch()
    loss = lm_loss(decoder(inputs), labels, mask, tensor_parallel=tensor_parallel)
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in decoder.named_parameters()}


def whole(parts, placement):
    """A parameter's whole value or gradient, from those of the ranks."""
    if placement.split_dim is None:
        return torch.stack(parts).sum(0) if placement.partial_gradient else parts[0]
    fused = [part.unflatten(placement.split_dim, (placement.num_fused, -1)) for part in parts]
    dim = placement.split_dim
    return torch.cat(fused, dim=dim + 1).flatten(dim, dim + 1)
