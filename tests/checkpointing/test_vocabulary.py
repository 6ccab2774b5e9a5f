"""The padding of a vocabulary follows the number of tensor ranks, so it may change where that does."""

import logging

import pytest
import torch

from megatron.checkpointing import LoadOptions, check_saved_model, load_checkpoint
from megatron.errors import CheckpointError
from tests.checkpointing.grid_runs import EMBEDDING, HEAD, Layout, full, load_rank, ranks, save_grid

WIDE, NARROW = 16, 12
TOKENS = 11


def values(padded, tokens=TOKENS):
    return {"hidden_size": 6, "padded_vocab_size": padded, "vocab_size": tokens}


def loaded_rows(root, layout, name, key):
    """The rows of a parameter, or of its optimizer state, as all ranks together read them into tensors of ones."""
    rows = []
    for wanted in ranks(layout):
        target = wanted.blank()
        for tensor in (*target.weights.values(), *(t for state in target.state.values() for t in state.values())):
            tensor.fill_(1)
        load_checkpoint(
            root,
            weights=target.weights,
            optimizer_state=target.state,
            holding=wanted.holding,
            model=values(layout.vocab),
        )
        tensor = target.weights[name] if key is None else target.state.get(name, {}).get(key, torch.empty(0))
        rows.append(tensor.reshape(-1))
    return torch.cat(rows).view(-1, 6)


@pytest.mark.parametrize("wanted", [Layout(vocab=WIDE), Layout(tp=2, vocab=WIDE), Layout(tp=4, vocab=WIDE, zero=True)])
@pytest.mark.parametrize("written", [Layout(), Layout(tp=2, dp=2, zero=True)], ids=str)
@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_rows_are_added(tmp_path, caplog, written, wanted, name):
    save_grid(tmp_path, ranks(written), model=values(NARROW))
    # Weights and their masters keep their starting values where nothing was saved; moments start at nothing.
    expected = {None: 1.0, "master": 1.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
    for key, start in expected.items():
        rows = loaded_rows(tmp_path, wanted, name, key)
        common = full(name, key or "weight", (NARROW, 6))
        assert torch.equal(rows[:NARROW], common if key else common.bfloat16())
        assert rows.shape == (WIDE, 6)
        assert (rows[NARROW:] == start).all()


@pytest.mark.parametrize("wanted", [Layout(), Layout(dp=3, zero=True), Layout(tp=2)], ids=str)
def test_rows_are_cut(tmp_path, caplog, wanted):
    save_grid(tmp_path, ranks(Layout(tp=4, vocab=WIDE)), model=values(WIDE))
    with caplog.at_level(logging.WARNING):
        rank = ranks(wanted)[0]
        load_rank(tmp_path, rank, model=values(NARROW))
    lines = [line for line in caplog.messages if "resized" in line]
    assert len(lines) == 1
    assert "vocabulary of 11 entries was padded to 16" in lines[0]
    if wanted.dp == 1:
        for key in (None, "exp_avg"):
            rows = loaded_rows(tmp_path, wanted, HEAD, key)
            common = full(HEAD, key or "weight", (WIDE, 6))[:NARROW]
            assert torch.equal(rows, common if key else common.bfloat16())


@pytest.mark.parametrize(("tokens_before", "tokens_now"), [(11, 10), (None, 11), (11, None)])
def test_another_vocabulary_is_refused_by_name(tmp_path, tokens_before, tokens_now):
    save_grid(tmp_path, ranks(Layout()), model=values(NARROW, tokens_before))
    wanted = ranks(Layout(tp=2, vocab=WIDE))[0]
    with pytest.raises(CheckpointError, match=r"padded_vocab_size was 12 and is 16 .*set padded_vocab_size: 12"):
        load_rank(tmp_path, wanted, model=values(WIDE, tokens_now))


def test_a_tokenizer_with_more_entries_in_the_same_padding_is_no_other_model(tmp_path):
    save_grid(tmp_path, ranks(Layout()), model=values(NARROW, 10))
    rank = ranks(Layout())[0]
    assert load_rank(tmp_path, rank, model=values(NARROW, 11))[1].same_as(rank)


def test_another_model_is_refused_before_it_is_built(tmp_path, caplog):
    options = LoadOptions()
    with caplog.at_level(logging.INFO):
        check_saved_model(tmp_path, values(NARROW), options=options)
        save_grid(tmp_path, ranks(Layout()), model=values(NARROW))
        check_saved_model(tmp_path, values(WIDE), options=options)
        check_saved_model(tmp_path, values(WIDE) | {"hidden_size": 7}, options=LoadOptions(finetune=True))
    assert not caplog.messages  # what can be lived with is said when it is loaded
    with pytest.raises(CheckpointError, match="hidden_size was 6 and is 7"):
        check_saved_model(tmp_path, values(WIDE) | {"hidden_size": 7}, options=options)


def test_no_other_dim_is_resized(tmp_path):
    save_grid(tmp_path, ranks(Layout()), model=values(NARROW))
    wanted = ranks(Layout(vocab=WIDE))[0]
    wanted.weights["layers.1.attention.dense.weight"] = torch.zeros(6, 12)
    with pytest.raises(CheckpointError, match=r"dense.weight \(saved \[6, 8\], here \[6, 12\]\)"):
        load_rank(tmp_path, wanted, model=values(WIDE))
