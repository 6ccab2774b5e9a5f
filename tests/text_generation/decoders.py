"""transformers' GPT-NeoX with random weights, called as our decoder is, with transformers' own cache."""

import torch
from transformers import DynamicCache, GPTNeoXConfig, GPTNeoXForCausalLM

VOCAB_SIZE = 40
EOD = 0
MAX_LENGTH = 32


def reference_decoder(seed=0):
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=EOD,
        pad_token_id=EOD,
    )
    return GPTNeoXForCausalLM(config).eval()


def as_model(decoder):
    def model(tokens_BS, cache=None):
        return decoder(tokens_BS, cache=cache, use_cache=cache is not None).logits

    return model


def make_cache(max_num_tokens):
    return DynamicCache()
