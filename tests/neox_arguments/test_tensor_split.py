"""Sizes that tensor ranks cannot share are named before any process starts."""

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments.arguments import load_flat

MODEL = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 12,
    "num_kv_heads": 4,
    "seq_length": 30,
    "intermediate_size": 40,
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
}


def load(**changes):
    return load_flat({key: value for key, value in {**MODEL, **changes}.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_attention_heads": 6, "num_kv_heads": 2}, "num_attention_heads 6 is not a multiple of"),
        ({"num_kv_heads": 2}, "num_kv_heads 2 is not a multiple of"),
        ({"intermediate_size": 42}, "ffn_hidden_size 42 is not a multiple of"),
        ({"padded_vocab_size": 1002}, "padded_vocab_size 1002 is not a multiple of"),
        ({"sequence_parallel": True}, "seq_length 30 is not a multiple of"),
    ],
)
def test_what_four_ranks_cannot_share_is_refused_with_its_numbers(changes, line):
    assert load(model_parallel_size=4).parallelism.world_size == 4
    assert load(**changes).parallelism.world_size == 1
    with pytest.raises(ConfigError) as error:
        load(**changes, model_parallel_size=4)
    assert any(found.startswith(f"{line} model_parallel_size 4:") for found in str(error.value).splitlines())


def test_a_derived_number_of_key_value_heads_counts():
    with pytest.raises(ConfigError, match="num_kv_heads 6 is not a multiple of model_parallel_size 4"):
        load(num_attention_heads=6, num_kv_heads=None, model_parallel_size=4)


def test_sequence_parallel_of_one_rank_is_accepted_and_said_to_be_without_effect():
    (notice,) = load(sequence_parallel=True).notices
    assert notice.startswith("sequence_parallel") and "model_parallel_size 1" in notice
    assert load(sequence_parallel=True, model_parallel_size=2).notices == ()
