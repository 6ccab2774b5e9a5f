"""`prove_overlap_steps`: says so where overlap changes nothing, and names what it changes where it does."""

import logging

import pytest
import torch

from megatron.errors import DivergenceError
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import assert_same_bits
from tests.engine.stage_engine import stage_engine, step_batches, weights_of

pytestmark = pytest.mark.distributed

VICTIM = "decoder.layers.2.mlp.dense_h_to_4h.weight"
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}


class _Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []
        logger = logging.getLogger("megatron.engine.prove")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.messages.append(record.getMessage())


def _proven(rank, options):
    said = _Messages().messages
    trained = []
    for num_proving_steps in (2, 0):
        torch.manual_seed(5 + rank)
        engine, grid = stage_engine(num_proving_steps=num_proving_steps, fields=DROPOUT, **options)
        accumulation = options.get("accumulation", 1)
        losses = [
            float(engine.train_batch(step_batches(step, grid.data.rank, accumulation)).loss) for step in (1, 2, 3)
        ]
        trained.append((losses, weights_of(engine)))
        engine.close()
    return trained, said


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"accumulation": 2}),
        (2, {"accumulation": 2, "zero_stage": 2, "dtype": torch.bfloat16}),
        (4, {"pipe": 2, "tied": True, "accumulation": 2, "zero_stage": 1}),
    ],
)
def test_a_proven_step_says_so_and_trains_as_an_ordinary_one(world_size, options):
    for ((losses, weights), (plain_losses, plain_weights)), said in run_ranks(world_size, _proven, options):
        assert losses == plain_losses
        assert_same_bits(weights, plain_weights)
        assert len(said) == 2, said
        assert all("bit for bit the same under backward and after it" in message for message in said)
        assert f"each of {world_size} ranks" in said[0]


def _disturbed(rank, which_pass):
    """Flip a bit of one gradient on rank 1, after the reduction in one of the three passes of a proven step."""
    said = _Messages().messages
    engine, grid = stage_engine(num_proving_steps=1)
    reducer = engine._reducer
    finish, passes = reducer.finish, []
    bucket = next(bucket for bucket in reducer._buckets if VICTIM in bucket.parameters)

    def finish_and_disturb():
        finish()
        passes.append(None)
        if rank == 1 and len(passes) == which_pass:
            bucket.averages[VICTIM].view(torch.int32)[0, 0] ^= 1

    reducer.finish = finish_and_disturb
    try:
        engine.train_batch(step_batches(1, grid.data.rank, 1))
    except DivergenceError as error:
        return str(error), said
    return "", said


def test_a_bit_that_overlap_changes_ends_the_run_with_rank_and_parameter():
    for error, said in run_ranks(2, _disturbed, 3):
        assert "step 1" in error and f"{VICTIM} on rank 1" in error and not said


def test_a_backward_that_does_not_repeat_its_bits_is_not_blamed_on_overlap():
    for error, said in run_ranks(2, _disturbed, 2):
        assert not error
        assert len(said) == 1 and "does not give the same bits twice" in said[0] and VICTIM in said[0]
