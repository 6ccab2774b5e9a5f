from types import SimpleNamespace

import pytest

from megatron.checkpointing import LoadOptions, load_checkpoint, model_values
from megatron.checkpointing.model_values import _NAMES
from megatron.errors import CheckpointError
from tests.checkpointing.runs import blank, save_alone, weights


def section(**changes):
    return SimpleNamespace(**(dict.fromkeys(_NAMES, 1) | {"hidden_dropout": 0.1, "seq_length": 64} | changes))


def test_what_changes_the_function_is_refused(tmp_path):
    save_alone(tmp_path, 1, model=model_values(section()))
    for name in ("rotary_pct", "gpt_j_residual", "activation", "padded_vocab_size"):
        with pytest.raises(CheckpointError, match=f"{name} was 1 and is 2"):
            load_checkpoint(tmp_path, weights=blank(weights()), model=model_values(section(**{name: 2})))


def test_what_may_change_is_not(tmp_path):
    save_alone(tmp_path, 1, model=model_values(section()))
    other = model_values(section(hidden_dropout=0.0, seq_length=128))
    assert load_checkpoint(tmp_path, weights=blank(weights()), model=other).run_state.iteration == 1


def test_finetune_takes_the_weights_all_the_same(tmp_path, caplog):
    save_alone(tmp_path, 1, model=model_values(section()))
    longer = model_values(section(rotary_emb_base=500_000))
    load_checkpoint(tmp_path, weights=blank(weights()), model=longer, options=LoadOptions(finetune=True))
    assert "rotary_emb_base was 1 and is 500000" in caplog.text


def test_a_renamed_argument_is_noticed():
    with pytest.raises(AttributeError):
        model_values(SimpleNamespace())
