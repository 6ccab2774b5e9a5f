"""Logits, gradients and dropout against transformers' models with the same weights."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from megatron.model.loss import lm_loss
from tests.model import transformers_names as names
from tests.model.small import VOCAB_SIZE, decoder, model_args, tokens

SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
SMALL |= {"intermediate_size": 80, "max_position_embeddings": 32, "use_cache": False}
NO_BIAS = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "use_bias_in_norms": False}
LLAMA = {"norm": "rmsnorm", **NO_BIAS}
GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_inner": 80, "n_positions": 32}
LEARNED = {"pos_emb": "learned", "no_weight_tying": False}


def randomized(model):
    """Away from zero biases and unit norms, which would hide what is swapped."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def loaded(ours, theirs, name_map):
    state = name_map(dict(theirs.named_parameters(remove_duplicate=False)), theirs.config)
    own_names = dict(ours.named_parameters())
    assert state.keys() == own_names.keys()
    with torch.no_grad():
        for name, parameter in own_names.items():
            parameter.copy_(state[name])
    return ours.eval()


def neox_pair(rotary_pct=1.0, parallel=False, bias=True, activation="gelu", dropouts=(0.0, 0.0)):
    config = transformers.GPTNeoXConfig(
        **SMALL,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rotary_pct},
        use_parallel_residual=parallel,
        attention_bias=bias,
        hidden_act=activation,
        attention_dropout=dropouts[0],
        hidden_dropout=dropouts[1],
    )
    args = model_args(
        rotary_pct=rotary_pct,
        gpt_j_residual=parallel,
        use_bias_in_attn_linear=bias,
        activation=activation,
        attention_dropout=dropouts[0],
        hidden_dropout=dropouts[1],
    )
    theirs = randomized(transformers.GPTNeoXForCausalLM(config))
    return loaded(decoder(args), theirs, names.neox), theirs


def llama_pair(theirs_class, config_class, args_fields, config_fields):
    theirs = randomized(theirs_class(config_class(**SMALL, tie_word_embeddings=False, **config_fields)))
    return loaded(decoder(model_args(**args_fields)), theirs, names.llama), theirs


def mistral_pair(window, num_kv_heads=2):
    fields = {**LLAMA, "activation": "swiglu", "num_kv_heads": num_kv_heads, "sliding_window_width": window}
    return llama_pair(
        transformers.MistralForCausalLM,
        transformers.MistralConfig,
        fields,
        {"num_key_value_heads": num_kv_heads, "sliding_window": window, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    )


def gated_llama_pair(activation, hidden_act):
    return llama_pair(
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        {**LLAMA, "activation": activation},
        {"hidden_act": hidden_act},
    )


def qwen_pair():
    return llama_pair(
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config,
        {**LLAMA, "activation": "swiglu", "num_kv_heads": 3, "use_qk_layernorm": True},
        {"num_key_value_heads": 3, "head_dim": 8, "rms_norm_eps": 1e-6},
    )


def olmo_pair():
    return llama_pair(
        transformers.OlmoForCausalLM,
        transformers.OlmoConfig,
        {**NO_BIAS, "norm": "non_parametric_layernorm", "activation": "swiglu"},
        {},
    )


def phi_pair():
    """One norm for attention and MLP. Phi's head alone has a bias, which we set to zero."""
    config = transformers.PhiConfig(
        **SMALL,
        hidden_act="gelu",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    theirs = randomized(transformers.PhiForCausalLM(config))
    torch.nn.init.zeros_(theirs.lm_head.bias)
    ours = decoder(model_args(rotary_pct=0.5, gpt_j_residual=True, gpt_j_tied=True))
    return loaded(ours, theirs, names.llama), theirs


def gpt2_pair():
    config = transformers.GPT2Config(**GPT2, activation_function="gelu", use_cache=False)
    theirs = randomized(transformers.GPT2LMHeadModel(config))
    return loaded(decoder(model_args(**LEARNED)), theirs, names.gpt2), theirs


def opt_pair():
    fields = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
    config = transformers.OPTConfig(**fields, ffn_dim=80, word_embed_proj_dim=48, activation_function="relu")
    theirs = randomized(transformers.OPTForCausalLM(config))
    ours = decoder(model_args(**LEARNED, activation="relu", opt_pos_emb_offset=2))
    return loaded(ours, theirs, names.opt), theirs


def mpt_pair():
    config = transformers.MptConfig(
        vocab_size=VOCAB_SIZE, d_model=48, n_layers=2, n_heads=6, max_seq_len=32, use_cache=False
    )
    theirs = randomized(transformers.MptForCausalLM(config))
    ours = decoder(model_args(pos_emb="alibi", no_weight_tying=False, ffn_hidden_size=192, **NO_BIAS))
    return loaded(ours, theirs, names.mpt), theirs


PAIRS = {
    "neox": neox_pair,
    "neox parallel, quarter rotary": lambda: neox_pair(rotary_pct=0.25, parallel=True),
    "neox parallel": lambda: neox_pair(parallel=True),
    "neox without attention biases": lambda: neox_pair(bias=False),
    "neox mish": lambda: neox_pair(activation="mish"),
    "neox silu": lambda: neox_pair(activation="silu"),
    "mistral": lambda: mistral_pair(window=None),
    "mistral window": lambda: mistral_pair(window=5),
    "mistral window, one kv head": lambda: mistral_pair(window=4, num_kv_heads=1),
    "llama swiglu": lambda: gated_llama_pair("swiglu", "silu"),
    "llama geglu": lambda: gated_llama_pair("geglu", "gelu"),
    "llama reglu": lambda: gated_llama_pair("reglu", "relu"),
    "llama glu": lambda: gated_llama_pair("glu", "sigmoid"),
    "llama bilinear": lambda: gated_llama_pair("bilinear", "linear"),
    "qwen: qk norm": qwen_pair,
    "olmo: norm without parameters": olmo_pair,
    "phi: one norm, parallel": phi_pair,
    "gpt2: learned positions, tied head": gpt2_pair,
    "opt: offset positions": opt_pair,
    "mpt: alibi": mpt_pair,
}


@pytest.mark.parametrize("name", PAIRS)
def test_same_logits(name):
    ours, theirs = PAIRS[name]()
    with torch.no_grad():
        expected = theirs(input_ids=tokens()).logits
        actual = ours(tokens())
    assert expected.abs().max() > 0.3
    assert (actual - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "name", ["neox parallel, quarter rotary", "mistral window", "gpt2: learned positions, tied head"]
)
def test_same_gradients(name):
    ours, theirs = PAIRS[name]()
    batch = tokens(seq_length=17)
    inputs, labels = batch[:, :-1], batch[:, 1:]
    loss = lm_loss(ours(inputs), labels, torch.ones(labels.shape))
    expected_loss = F.cross_entropy(theirs(input_ids=inputs).logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-6)
    loss.backward()
    expected_loss.backward()
    name_map = {"neox": names.neox, "mist": names.llama, "gpt2": names.gpt2}[name[:4]]
    their_grads = {name: p.grad for name, p in theirs.named_parameters(remove_duplicate=False)}
    for parameter_name, expected in name_map(their_grads, theirs.config).items():
        actual = ours.get_parameter(parameter_name).grad
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6, msg=lambda m, n=parameter_name: f"{n}: {m}")


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("dropouts", [(0.3, 0.0), (0.0, 0.3), (0.2, 0.1)])
def test_dropout_falls_in_the_same_places(parallel, dropouts):
    ours, theirs = neox_pair(parallel=parallel, dropouts=dropouts)
    without = ours(tokens())
    assert (without - theirs(input_ids=tokens()).logits).abs().max() <= 1e-5
    ours.train(), theirs.train()
    torch.manual_seed(5)
    expected = theirs(input_ids=tokens()).logits
    torch.manual_seed(5)
    actual = ours(tokens())
    assert (without - expected).abs().max() > 1e-2
    assert (actual - expected).abs().max() <= 1e-5
