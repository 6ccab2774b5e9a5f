"""Small models and inputs for the tests of `megatron.model`."""

import torch

from megatron.model.decoder import Decoder, decoder_layers
from megatron.mpu.tensor_parallel import NOT_SPLIT
from megatron.neox_arguments.model import ModelArgs

VOCAB_SIZE = 96


_SMALL = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_kv_heads": 6,
    "ffn_hidden_size": 80,
    "seq_length": 16,
    "max_position_embeddings": 32,
    "rms_norm_epsilon": 1e-6,
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "padded_vocab_size": VOCAB_SIZE,
}


def model_args(**fields):
    return ModelArgs(**{**_SMALL, **fields})


def specs(args, seed=7):
    return decoder_layers(args, seed=seed, tensor_parallel=NOT_SPLIT)


def decoder(args, seed=7):
    return Decoder(specs(args, seed))


def tokens(batch_size=2, seq_length=16, seed=3):
    return torch.randint(VOCAB_SIZE, (batch_size, seq_length), generator=torch.Generator().manual_seed(seed))
