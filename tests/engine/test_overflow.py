"""Contract line 24: an infinity on one rank of any axis makes every rank skip that step, once, and nothing else."""

import pytest
import torch

from megatron.optimizer.loss_scale import ConstantLossScale, DynamicLossScale
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import assert_same_bits
from tests.engine.stage_engine import stage_engine, step_batches, weights_of

pytestmark = pytest.mark.distributed

BROKEN_STEP = 3


def _break_when_asked(model, is_asked):
    """Make one gradient of this rank infinite in every backward in which `is_asked` says so."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    weights[len(weights) // 2].register_hook(lambda grad: grad * float("inf") if is_asked() else grad)


def _train(rank, victim, steps, scale, options):
    """Train on the batches of `steps`; the gradient of BROKEN_STEP is infinite on the rank `victim`."""
    step = 0
    breaks_here = rank == victim
    engine, grid = stage_engine(
        dtype=torch.float16,
        loss_scale=scale,
        accumulation=2,
        prepare=lambda model, _: _break_when_asked(model, lambda: breaks_here and step == BROKEN_STEP),
        **options,
    )
    rows, unchanged = [], []
    for step in steps:
        before = weights_of(engine)
        result = engine.train_batch(step_batches(step, grid.data.rank, 2))
        after = weights_of(engine)
        unchanged.append(all(torch.equal(before[name], after[name]) for name in before))
        updates = engine.optimizer.progress.num_updates
        rows.append((float(result.loss), float(result.skipped), result.loss_scale, result.learning_rate, updates))
    engine.close()
    return rows, unchanged, weights_of(engine)


def _every_way(rank, victim, variants):
    results = []
    for options in variants:
        dynamic = [
            _train(rank, victim, range(1, 6), DynamicLossScale(2.0**10, 2, 1, 1.0), {**options, "overlap": overlap})
            for overlap in (True, False)
        ]
        constant, without = (
            _train(rank, victim, steps, ConstantLossScale(2.0**10), options)
            for steps in (range(1, 6), [step for step in range(1, 6) if step != BROKEN_STEP])
        )
        results.append((dynamic, constant, without))
    return results


def _check(world_size, victim, variants):
    ranks = run_ranks(world_size, _every_way, victim, variants)
    for rank, results in enumerate(ranks):
        for index, (dynamic, constant, without) in enumerate(results):
            (on, off), rows = dynamic, ranks[0][index][0][0][0]
            assert on[0] == off[0] == rows, (rank, variants[index])
            assert_same_bits(on[2], off[2])
            assert on[1] == off[1] == [step == BROKEN_STEP for step in range(1, 6)], "skipped is when nothing changes"
            # Two clean steps double the scale, the overflow halves it, two more double it; the schedule stood still.
            assert [row[1] for row in rows] == [0, 0, 1, 0, 0]
            assert [row[2] for row in rows] == [2.0**10, 2.0**10, 2.0**11, 2.0**10, 2.0**10]
            assert [row[4] for row in rows] == [1, 2, 2, 3, 4] and rows[2][3] == rows[3][3]
            # At a scale that stays, training goes on as if the step had never been.
            assert constant[0][BROKEN_STEP:] == without[0][BROKEN_STEP - 1 :]
            assert_same_bits(constant[2], without[2])


def test_contract_24_an_overflow_on_one_data_rank():
    _check(2, 1, [{"zero_stage": zero_stage} for zero_stage in (0, 1, 2)])


def test_contract_24_an_overflow_on_one_tensor_rank():
    _check(2, 1, [{"tensor": 2}, {"tensor": 2, "sequence": True}])


def test_contract_24_an_overflow_on_one_stage():
    _check(2, 1, [{"pipe": 2}, {"pipe": 2, "tied": True, "zero_stage": 1}])


def test_contract_24_an_overflow_on_one_rank_of_one_stage():
    _check(4, 2, [{"pipe": 2, "zero_stage": zero_stage} for zero_stage in (0, 2)])
