"""Small models and inputs for the tests of `megatron.model`."""

from dataclasses import dataclass, replace

import torch

from megatron.model.decoder import Decoder, decoder_layers
from megatron.mpu.tensor_parallel import NOT_SPLIT

VOCAB_SIZE = 96


@dataclass(frozen=True)
class Args:
    num_layers: int = 2
    hidden_size: int = 48
    num_attention_heads: int = 6
    num_kv_heads: int = 6
    ffn_hidden_size: int = 80
    seq_length: int = 16
    max_position_embeddings: int = 32
    sliding_window_width: int | None = None
    norm: str = "layernorm"
    layernorm_epsilon: float = 1e-5
    rms_norm_epsilon: float = 1e-6
    scalenorm_epsilon: float = 1e-8
    use_qk_layernorm: bool = False
    pos_emb: str = "rotary"
    opt_pos_emb_offset: int = 0
    no_weight_tying: bool = True
    activation: str = "gelu"
    rotary_pct: float = 1.0
    rotary_emb_base: int = 10000
    init_method: str = "normal"
    output_layer_init_method: str = "scaled_normal"
    init_method_std: float = 0.02
    gpt_j_residual: bool = False
    gpt_j_tied: bool = False
    use_bias_in_norms: bool = True
    use_bias_in_attn_linear: bool = True
    use_bias_in_mlp: bool = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    checkpoint_activations: bool = False
    checkpoint_num_layers: int = 1
    padded_vocab_size: int | None = VOCAB_SIZE


def model_args(**fields):
    return replace(Args(), **fields)


def specs(args, seed=7):
    return decoder_layers(args, seed=seed, tensor_parallel=NOT_SPLIT)


def decoder(args, seed=7):
    return Decoder(specs(args, seed))


def tokens(batch_size=2, seq_length=16, seed=3):
    return torch.randint(VOCAB_SIZE, (batch_size, seq_length), generator=torch.Generator().manual_seed(seed))
