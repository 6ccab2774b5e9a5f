"""Failures that users of public trainers report for this combination of features, through the engine that trains here.

The rest of them are lines of the contract: docs/contract.md says which test stands for which.
"""

import pytest
import torch
from torch import nn

from tests.distributed.ranks import run_ranks
from tests.distributed.toy import assert_same_bits
from tests.engine.cells import EPS, FIELDS, MAX_NORM, plain_torch
from tests.engine.stage_engine import stage_engine, step_batches, weights_of

pytestmark = pytest.mark.distributed

NUM_STEPS, ACCUMULATION = 4, 4


def _bf16(rank, pipe, zero_stages):
    found = []
    for zero_stage in zero_stages:
        engine, grid = stage_engine(
            pipe=pipe,
            zero_stage=zero_stage,
            dtype=torch.bfloat16,
            accumulation=ACCUMULATION,
            max_norm=MAX_NORM,
            eps=EPS,
            fields=FIELDS,
        )
        results = [
            engine.train_batch(step_batches(step, grid.data.rank, ACCUMULATION)) for step in range(1, NUM_STEPS + 1)
        ]
        found.append([(float(result.loss), float(result.grad_norm), result.loss_scale) for result in results])
        engine.close()
    return found


def _check_bf16(pipe, zero_stages):
    expected, _ = plain_torch(2, ACCUMULATION, False)
    for results in run_ranks(2 * pipe, _bf16, pipe, zero_stages):
        for rows in results:
            for (loss, norm, scale), (expected_loss, expected_norm) in zip(rows, expected, strict=False):
                assert loss == pytest.approx(expected_loss, rel=1e-2)
                assert norm == pytest.approx(expected_norm, rel=5e-2)
                assert scale is None


def test_public_failure_bf16_with_one_stage_is_implemented_at_every_zero_stage():
    _check_bf16(1, (0, 1, 2))


def test_public_failure_bf16_at_zero_0_with_stages_has_the_true_norm_of_losses_that_nobody_scaled():
    _check_bf16(2, (0,))


FACTOR, RATE = 0.5, 1e-2


class _Extras:
    """Gives a model `never`, which has no part in the loss, and `sometimes`, whose sum has FACTOR in it when asked."""

    def __init__(self, model):
        model.never, model.sometimes = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(5))
        model.register_forward_hook(self._extend)
        self.asked = False

    def _extend(self, model, inputs, loss):
        return loss + FACTOR * model.sometimes.sum() if self.asked else loss


def _without_gradient(rank, overlap):
    extras = []
    engine, grid = stage_engine(
        overlap=overlap,
        zero_stage=2,
        accumulation=2,
        rule="sgd",
        learning_rate=RATE,
        max_norm=0.0,
        bucket_elements=500,
        prepare=lambda model, grid: extras.append(_Extras(model)),
    )
    for step in (1, 2):
        # Rank 0 alone, and in one of two steps alone.
        extras[0].asked = rank == 0 and step == 2
        engine.train_batch(step_batches(step, grid.data.rank, 2))
    weights = weights_of(engine)
    engine.close()
    return weights


def _both(rank):
    return [_without_gradient(rank, overlap) for overlap in (True, False)]


def test_public_failure_zero_2_with_overlap_and_parameters_without_gradient_does_not_crash():
    for on, off in run_ranks(2, _both):
        assert_same_bits(on, off)
        assert torch.equal(on["never"], torch.ones(7))
        # The schedule is at its peak in the second step; both micro-batches of one of two ranks have the gradient.
        torch.testing.assert_close(on["sometimes"], torch.full((5,), 1.0 - RATE * FACTOR / 2), rtol=1e-6, atol=0.0)
