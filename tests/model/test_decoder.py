"""The list of layers: names, stages, tying, sizes, meta device, recomputation, compilation, dtypes."""

import pytest
import torch

from megatron.errors import ConfigError
from megatron.model.attention import SelfAttention
from megatron.model.decoder import Decoder
from megatron.model.loss import lm_loss
from megatron.neox_arguments.section import DERIVED
from tests.model.small import decoder, model_args, specs, tokens

TIED = {"no_weight_tying": False}


def gradients(model, seed=0):
    torch.manual_seed(seed)
    model.zero_grad()
    batch = tokens(seq_length=17)
    lm_loss(model(batch[:, :-1]), batch[:, 1:], torch.ones(2, 16)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_identical(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_list_is_embedding_blocks_norm_head():
    kinds = [(spec.index, spec.kind) for spec in specs(model_args())]
    assert kinds == [(0, "embedding"), (1, "block"), (2, "block"), (3, "final_norm"), (4, "head")]


@pytest.mark.parametrize("tied", [False, True])
def test_stages_have_the_names_values_and_outputs_of_the_whole(tied):
    layers = specs(model_args(pos_emb="learned", no_weight_tying=not tied))
    whole, first, last = Decoder(layers), Decoder(layers[:2]), Decoder(layers[2:])
    assert_identical({**first.state_dict(), **last.state_dict()}, whole.state_dict())
    assert torch.equal(last(first(tokens())), whole(tokens()))


def test_tied_head_is_one_parameter():
    tied, untied = decoder(model_args(**TIED)), decoder(model_args())
    assert tied.layers["4"].final_linear.weight is tied.layers["0"].word_embeddings.weight
    assert "layers.4.final_linear.weight" not in dict(tied.named_parameters())
    assert not torch.equal(untied.layers["4"].final_linear.weight, untied.layers["0"].word_embeddings.weight)


def test_tied_weight_has_one_name_on_both_stages():
    embedding, *_, head = specs(model_args(**TIED))
    assert (embedding.tied_weight, head.tied_weight) == ("word_embeddings.weight", "final_linear.weight")
    assert embedding.parameter_name(embedding.tied_weight) == head.parameter_name(head.tied_weight)
    untied_head = specs(model_args())[-1]
    assert untied_head.tied_weight is None
    assert untied_head.parameter_name("final_linear.weight") == "layers.4.final_linear.weight"


PYTHIA_SIZES = {  # layers, hidden size, heads, padded vocabulary, published total
    "70m": (6, 512, 8, 50304, 70_426_624),
    "160m": (12, 768, 12, 50304, 162_322_944),
    "410m": (24, 1024, 16, 50304, 405_334_016),
    "1b": (16, 2048, 8, 50304, 1_011_781_632),
    "6.9b": (32, 4096, 32, 50432, 6_857_302_016),
}


@pytest.mark.parametrize("name", PYTHIA_SIZES)
def test_total_of_published_models_on_meta(name):
    num_layers, hidden_size, heads, vocabulary, total = PYTHIA_SIZES[name]
    shape = {"num_layers": num_layers, "hidden_size": hidden_size, "ffn_hidden_size": 4 * hidden_size}
    args = model_args(
        **shape, num_attention_heads=heads, num_kv_heads=heads, padded_vocab_size=vocabulary, gpt_j_residual=True
    )
    with torch.device("meta"):
        model = decoder(args)
    assert sum(parameter.numel() for parameter in model.parameters()) == total


@pytest.mark.parametrize("pos_emb", ["rotary", "alibi", "sinusoidal"])
def test_meta_build_materialises_to_the_direct_build(pos_emb):
    layers = specs(model_args(pos_emb=pos_emb, norm="scalenorm"))
    with torch.device("meta"):
        model = Decoder(layers)
    model.to_empty(device="cpu")
    for spec in layers:
        spec.initialize(model.layers[str(spec.index)])
    assert_identical(model.state_dict(), Decoder(layers).state_dict())
    assert torch.equal(model(tokens()), Decoder(layers)(tokens()))


def test_parameters_without_use_are_not_there():
    args = model_args(
        norm="non_parametric_layernorm", use_bias_in_attn_linear=False, use_bias_in_mlp=False, gpt_j_residual=True
    )
    names = {name for name, _ in decoder(args).named_parameters()}
    assert not any("norm" in name or "bias" in name for name in names)
    tied_norm = decoder(model_args(gpt_j_residual=True, gpt_j_tied=True))
    assert not any("post_attention_layernorm" in name for name, _ in tied_norm.named_parameters())
    assert all(grad.any() for grad in gradients(tied_norm).values())
    no_norm_bias = decoder(model_args(use_bias_in_norms=False))
    assert not any("norm.bias" in name for name, _ in no_norm_bias.named_parameters())


@pytest.mark.parametrize("num_layers_at_once", [1, 2, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputed_gradients_are_identical(num_layers_at_once, dropout, monkeypatch):
    fields = {"num_layers": 3, "attention_dropout": dropout, "hidden_dropout": dropout, **TIED}
    expected = gradients(decoder(model_args(**fields)))
    recomputing = decoder(model_args(**fields, checkpoint_activations=True, checkpoint_num_layers=num_layers_at_once))
    num_calls = count_attention_calls(monkeypatch)
    assert_identical(gradients(recomputing), expected)
    assert len(num_calls) == 2 * 3
    with torch.no_grad():
        recomputing(tokens())
    assert len(num_calls) == 3 * 3


def test_recomputation_is_not_reentrant():
    """A reentrant one knows backward() only, and fires a shared weight's gradient hook with a part of its gradient."""
    model = decoder(model_args(checkpoint_activations=True))
    grads = torch.autograd.grad(model(tokens()).sum(), list(model.parameters()))
    assert all(grad.any() for grad in grads)


def count_attention_calls(monkeypatch):
    calls, forward = [], SelfAttention.forward
    monkeypatch.setattr(SelfAttention, "forward", lambda *args: (calls.append(1), forward(*args))[1])
    return calls


def test_recomputation_keeps_less():
    def saved_elements(model):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            model(tokens())
        return sum(sizes)

    fields = {"num_layers": 3}
    assert saved_elements(decoder(model_args(**fields, checkpoint_activations=True))) < 0.3 * saved_elements(
        decoder(model_args(**fields))
    )


FAMILIES = {
    "neox": {"rotary_pct": 0.25, "gpt_j_residual": True},
    "gpt2": {"pos_emb": "learned", **TIED},
    "mistral": {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "sliding_window_width": 5},
    "alibi": {"pos_emb": "alibi", "norm": "scalenorm"},
    "qk norm": {"use_qk_layernorm": True, "pos_emb": "sinusoidal"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_without_graph_breaks(family):
    model = decoder(model_args(**FAMILIES[family]))
    batch = tokens(seq_length=17)

    def loss(model, batch):
        return lm_loss(model(batch[:, :-1]), batch[:, 1:], torch.ones(2, 16))

    expected = gradients(model)
    model.zero_grad()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(model, batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_close_to_fp32(family, dtype):
    model = decoder(model_args(**FAMILIES[family], init_method="small_init"))
    expected = model(tokens())
    logits = model.to(dtype)(tokens())
    assert logits.dtype == dtype
    assert (logits.float() - expected).abs().max() < 0.03 * expected.abs().max()
    assert all(torch.isfinite(grad).all() for grad in gradients(model).values())


@pytest.mark.parametrize("pos_emb", ["rotary", "alibi", "sinusoidal"])
def test_tables_stay_fp32_and_out_of_the_state_dict(pos_emb):
    model = decoder(model_args(pos_emb=pos_emb))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert before
    assert_identical(dict(model.bfloat16().named_buffers()), before)
    assert all(buffer.dtype == torch.float32 for buffer in before.values())
    assert model.state_dict().keys() == {name for name, _ in model.named_parameters()}


def test_unknown_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="padded_vocab_size"):
        decoder(model_args().model_copy(update={"padded_vocab_size": DERIVED}))


@pytest.mark.parametrize("pos_emb", ["rotary", "learned", "sinusoidal", "alibi", "none"])
def test_a_token_sees_no_later_token(pos_emb):
    model = decoder(model_args(pos_emb=pos_emb))
    changed = tokens()
    changed[:, 9] += 1
    difference = (model(changed % 96) - model(tokens() % 96)).abs().amax((0, 2))
    assert torch.equal(difference[:9], torch.zeros(9))
    assert (difference[9:] > 0).all()
