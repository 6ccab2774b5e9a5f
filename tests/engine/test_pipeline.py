"""Training over pipeline stages against one stage, from the same seed and over the same samples."""

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.toy import assert_same_bits
from tests.engine.stage_engine import stage_engine, step_batches, train, weights_of

pytestmark = pytest.mark.distributed

TIED_NAMES = ("layers.0.word_embeddings.weight", "layers.5.final_linear.weight")


def _merged(per_rank):
    merged = {}
    for _, weights in per_rank:
        merged.update(weights)
    return merged


def _several(rank, num_steps, variants):
    """Train every variant, in the same processes: starting them takes longer than training."""
    return [train(rank, num_steps, options) for options in variants]


def _compare(world_size, pipe, variants, *, num_steps=4, rtol=1e-5, atol=1e-6):
    """Check each variant over `pipe` stages against one stage, and with overlap against without."""
    data = world_size // pipe
    one = run_ranks(data, _several, num_steps, variants)
    many = [{**options, "pipe": pipe, "overlap": overlap} for options in variants for overlap in (True, False)]
    staged = run_ranks(world_size, _several, num_steps, many)
    for index, options in enumerate(variants):
        expected_losses, expected = one[0][index]
        on, off = ([rank[2 * index + which] for rank in staged] for which in (0, 1))
        for (losses, weights), (losses_off, weights_off) in zip(on, off, strict=True):
            assert losses == losses_off, options
            assert_same_bits(weights, weights_off)
            assert losses == pytest.approx(expected_losses, rel=rtol), options
        names = set(expected) | ({TIED_NAMES[1]} if options.get("tied") else set())
        weights = _merged(on)
        assert set(weights) == names
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], rtol=rtol, atol=atol)
        if options.get("tied"):
            assert torch.equal(*(weights[name] for name in TIED_NAMES))


@pytest.mark.parametrize("tied", [False, True])
def test_two_stages_train_as_one_with_overlap_and_without(tied):
    _compare(2, 2, [{"tied": tied, "accumulation": count, "recompute": count == 4} for count in (1, 4)])
