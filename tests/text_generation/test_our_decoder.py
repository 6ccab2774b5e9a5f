"""Our decoder, saved, loaded into another one and generating, with its own cache and without."""

from types import SimpleNamespace

import pytest
import torch

from megatron.checkpointing import LoadOptions, RunState, SaveRole, Snapshot, load_checkpoint, model_values, save
from megatron.model.decoder import Decoder, decoder_layers
from megatron.model.kv_cache import KVCache
from megatron.mpu.tensor_parallel import TensorParallel
from megatron.text_generation import DecodeSettings, Sampling, generate_tokens
from megatron.text_generation.sampling import sample_generator

PROMPTS = [[5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6]]


def decoder(seed=0, **changes):
    values = {
        "activation": "gelu",
        "attention_dropout": 0.1,
        "checkpoint_activations": False,
        "checkpoint_num_layers": 1,
        "ffn_hidden_size": 64,
        "gpt_j_residual": False,
        "gpt_j_tied": False,
        "hidden_dropout": 0.1,
        "hidden_size": 32,
        "init_method": "normal",
        "init_method_std": 0.5,
        "layernorm_epsilon": 1e-5,
        "max_position_embeddings": 32,
        "no_weight_tying": True,
        "norm": "layernorm",
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "num_layers": 2,
        "opt_pos_emb_offset": 0,
        "output_layer_init_method": "normal",
        "padded_vocab_size": 48,
        "pos_emb": "rotary",
        "rms_norm_epsilon": 1e-8,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.5,
        "scalenorm_epsilon": 1e-8,
        "sliding_window_width": None,
        "use_bias_in_attn_linear": True,
        "use_bias_in_mlp": True,
        "use_bias_in_norms": True,
        "use_qk_layernorm": False,
    }
    args = SimpleNamespace(**(values | changes))
    return args, Decoder(decoder_layers(args, seed=seed, tensor_parallel=TensorParallel())).eval()


def tokens(model, sampling, make_cache):
    completions = generate_tokens(
        model,
        PROMPTS,
        DecodeSettings(sampling, maximum_tokens=12, max_length=32, eod=0, vocab_size=40),
        generators=[sample_generator(0, sample) for sample in range(len(PROMPTS))],
        make_cache=make_cache,
    )
    return [completion.tokens for completion in completions]


@pytest.mark.parametrize("pos_emb", ["rotary", "learned", "sinusoidal", "alibi", "none"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0, 0.9)])
def test_cache_changes_nothing(pos_emb, sampling):
    _, model = decoder(pos_emb=pos_emb)
    with_cache = tokens(model, sampling, KVCache)
    assert with_cache == tokens(model, sampling, None)
    assert all(0 < len(row) <= 12 for row in with_cache)


@pytest.mark.parametrize("no_weight_tying", [True, False])
def test_generates_the_same_after_save_and_load(tmp_path, no_weight_tying):
    args, trained = decoder(seed=1, no_weight_tying=no_weight_tying)
    content = Snapshot(dict(trained.named_parameters()), RunState(3), model=model_values(args))
    directory = save(tmp_path, content, role=SaveRole.of_rank(0, 1), agree=bool)
    assert (directory / "layer_004.safetensors").exists() == no_weight_tying
    _, fresh = decoder(seed=2, no_weight_tying=no_weight_tying)
    before = tokens(fresh, Sampling(), KVCache)
    load_checkpoint(
        tmp_path,
        weights=dict(fresh.named_parameters()),
        model=model_values(args),
        options=LoadOptions(no_load_rng=True),
    )
    assert tokens(fresh, Sampling(), KVCache) == tokens(trained, Sampling(), KVCache) != before
    batch = torch.tensor(PROMPTS[:1])
    assert torch.equal(fresh(batch), trained(batch))
