"""What a decoder says of itself when tensor ranks split it: sizes it refuses, and how ranks hold its parameters."""

import pytest
import torch

from megatron.errors import ConfigError
from megatron.model.decoder import Decoder, decoder_layers
from megatron.model.kv_cache import KVCache
from megatron.mpu.tensor_parallel import NOT_SPLIT, Placement, TensorParallel, parameter_placements
from tests.model.small import model_args, tokens

TENSOR = TensorParallel(0, 2)
SEQUENCE = TensorParallel(0, 2, sequence_parallel=True)
WHOLE, ROWS, COLUMNS = Placement(), Placement(split_dim=0), Placement(split_dim=1)
PARTIAL = Placement(partial_gradient=True)


def build(tensor_parallel, **fields):
    return Decoder(decoder_layers(model_args(**fields), seed=7, tensor_parallel=tensor_parallel))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 3, "num_kv_heads": 3}, "num_attention_heads 3 is not a multiple of"),
        ({"num_kv_heads": 1}, "num_kv_heads 1 is not a multiple of"),
        ({"ffn_hidden_size": 81}, "81 is not a multiple of"),
        ({"ffn_hidden_size": 81, "activation": "swiglu"}, "81 is not a multiple of"),
        ({"padded_vocab_size": 97}, "97 is not a multiple of"),
        ({"seq_length": 15}, "seq_length 15 is not a multiple of"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_their_numbers(fields, message):
    with pytest.raises(ConfigError, match=f"{message} model_parallel_size 2"):
        build(SEQUENCE, **fields)


def test_a_length_needs_to_divide_only_where_the_sequence_is_split():
    assert build(TENSOR, seq_length=15)
    assert build(TensorParallel(sequence_parallel=True), seq_length=15)


def test_a_cache_is_refused_with_sequence_parallelism():
    with pytest.raises(ValueError, match="sequence parallelism"), torch.no_grad():
        build(SEQUENCE)(tokens(), KVCache(16))


def expected_placements(norms, heads, row_bias):
    block = {
        "input_layernorm.weight": norms,
        "input_layernorm.bias": norms,
        "post_attention_layernorm.weight": norms,
        "post_attention_layernorm.bias": norms,
        "attention.query_key_value.weight": ROWS,
        "attention.query_key_value.bias": ROWS,
        "attention.query_norm.weight": heads,
        "attention.query_norm.bias": heads,
        "attention.key_norm.weight": heads,
        "attention.key_norm.bias": heads,
        "attention.dense.weight": COLUMNS,
        "attention.dense.bias": row_bias,
        "mlp.dense_h_to_4h.weight": Placement(split_dim=0, num_fused=2),
        "mlp.dense_h_to_4h.bias": Placement(split_dim=0, num_fused=2),
        "mlp.dense_4h_to_h.weight": COLUMNS,
        "mlp.dense_4h_to_h.bias": row_bias,
    }
    return {
        "layers.0.word_embeddings.weight": ROWS,
        "layers.0.position_embeddings.weight": WHOLE,
        **{f"layers.1.{name}": placement for name, placement in block.items()},
        "layers.2.norm.weight": norms,
        "layers.2.norm.bias": norms,
    }


@pytest.mark.parametrize(
    ("tensor_parallel", "expected"),
    [
        (NOT_SPLIT, expected_placements(norms=WHOLE, heads=WHOLE, row_bias=WHOLE)),
        (TENSOR, expected_placements(norms=WHOLE, heads=PARTIAL, row_bias=WHOLE)),
        (SEQUENCE, expected_placements(norms=PARTIAL, heads=PARTIAL, row_bias=PARTIAL)),
    ],
    ids=["alone", "tensor", "sequence"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_how_ranks_hold_each_parameter(tensor_parallel, expected, tied):
    decoder = build(
        tensor_parallel,
        num_layers=1,
        pos_emb="learned",
        activation="swiglu",
        use_qk_layernorm=True,
        no_weight_tying=not tied,
    )
    head = {} if tied else {"layers.3.final_linear.weight": ROWS}
    assert parameter_placements(decoder) == {**expected, **head}
