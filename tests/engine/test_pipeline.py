"""Training over pipeline stages against one stage, from the same seed and over the same samples."""

import logging

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.toy import assert_same_bits
from tests.engine.stage_engine import batch_of, stage_engine, step_batches, train, weights_of

pytestmark = pytest.mark.distributed

TIED_NAMES = ("layers.0.word_embeddings.weight", "layers.5.final_linear.weight")


def _several(rank, num_steps, variants):
    """Train every variant, in the same processes: starting them takes longer than training."""
    return [train(rank, num_steps, options) for options in variants]


def _compare(world_size, pipe, variants, *, num_steps=4, rtol=1e-5, atol=1e-6):
    """Check each variant over `pipe` stages against one stage, and with overlap against without."""
    one = run_ranks(world_size // pipe, _several, num_steps, variants)
    many = [{**options, "pipe": pipe, "overlap": overlap} for options in variants for overlap in (True, False)]
    staged = run_ranks(world_size, _several, num_steps, many)
    for index, options in enumerate(variants):
        expected_losses, expected = one[0][index]
        found = {}
        for rank in staged:
            (losses, weights), (losses_off, weights_off) = rank[2 * index : 2 * index + 2]
            assert losses == losses_off, options
            assert_same_bits(weights, weights_off)
            assert losses == pytest.approx(expected_losses, rel=rtol), options
            for name, weight in weights.items():
                assert torch.equal(found.setdefault(name, weight), weight), "data ranks drifted apart"
        tied = options.get("tied", False)
        assert set(found) == set(expected) | ({TIED_NAMES[1]} if tied else set())
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=atol)
        if tied:
            assert torch.equal(*(found[name] for name in TIED_NAMES)), options


def test_two_stages_train_as_one_and_on_equals_off():
    _compare(
        2,
        2,
        [
            {"tied": False, "accumulation": 1},
            {"tied": True, "accumulation": 4, "recompute": True, "method": "parameters"},
            {"tied": True, "accumulation": 1, "method": "type:transformer|mlp"},
        ],
    )


def test_two_stages_train_as_one_in_bfloat16():
    """The two halves of a tied gradient are each rounded to bf16 on two stages, and their sum on one: 2e-2."""
    variants = [{"tied": tied, "accumulation": 4, "dtype": torch.bfloat16} for tied in (True, False)]
    _compare(2, 2, variants, rtol=2e-2, atol=1e-2)


def test_two_stages_of_two_data_ranks():
    _compare(4, 2, [{"tied": True, "accumulation": 2}])


def test_four_stages_of_which_some_have_no_block():
    _compare(4, 4, [{"tied": True, "accumulation": 4, "method": "type:transformer"}], num_steps=3)


def test_tied_copies_stay_bit_identical():
    per_rank = run_ranks(2, train, 20, {"pipe": 2, "tied": True, "accumulation": 2, "dtype": torch.bfloat16})
    (first_losses, first), (losses, last) = per_rank
    assert first_losses == losses
    assert len(set(losses)) == 20
    assert torch.equal(first[TIED_NAMES[0]], last[TIED_NAMES[1]])


def _train_evaluate_train_evaluate(rank, pipe):
    evaluated, grid = stage_engine(pipe=pipe, tied=True, accumulation=2)
    rows, kept, taken = [], [], []
    for step, length in ((1, 12), (2, 5), (3, 8)):
        rows.append(float(evaluated.train_batch(step_batches(step, grid.data.rank, 2)).loss))
        batches = step_batches(100 + step, grid.data.rank, 2, length=length)
        rows += [float(evaluated.eval_batch(batches))]
        taken.append(2 - len(list(batches)))
        kept += [name for name, p in evaluated.module.named_parameters() if p.grad is not None]
    evaluated.optimizer.settle()
    weights = weights_of(evaluated)
    evaluated.close()
    quiet, _ = stage_engine(pipe=pipe, tied=True, accumulation=2)
    for step in (1, 2, 3):
        quiet.train_batch(step_batches(step, grid.data.rank, 2))
    return rows, kept, taken, weights, weights_of(quiet)


def test_evaluation_between_steps_with_other_lengths_disturbs_nothing():
    expected = run_ranks(1, _train_evaluate_train_evaluate, 1)[0][0]
    for rows, kept, taken, weights, quiet in run_ranks(2, _train_evaluate_train_evaluate, 2):
        assert rows == pytest.approx(expected, rel=1e-5)
        assert kept == [] and taken == [2, 2, 2]
        assert_same_bits(weights, quiet)


def _middle_stage_reads_nothing(rank):
    engine, grid = stage_engine(pipe=3, accumulation=3)
    batches = None if grid.pipe.rank == 1 else step_batches(1, 0, 3)
    result = engine.train_batch(batches if batches is not None else iter(()), stop_requested=grid.pipe.rank == 1)
    return float(result.loss), float(result.stop_requested)


def test_a_stage_in_between_needs_no_data_and_all_stages_learn_loss_and_stop():
    results = run_ranks(3, _middle_stage_reads_nothing)
    assert len(set(results)) == 1
    assert results[0][0] > 0 and results[0][1] == 1.0


def _launches(rank):
    """What was launched during the boundary backward, and which parameters the buckets have."""
    engine, grid = stage_engine(pipe=2, tied=True, accumulation=2)
    reducer = engine._reducer
    engine.train_batch(step_batches(1, grid.data.rank, 2))
    members = [[slot.name for slot in bucket.plan.slots] for bucket in reducer._buckets]
    groups = [
        (bucket.plan.group.name, bucket.plan.group.size, bucket.plan.group.divisor) for bucket in reducer._buckets
    ]
    return members, groups, grid.pipe.rank


def test_the_tied_weight_is_reduced_alone_and_last_over_both_stages():
    for members, groups, stage in run_ranks(4, _launches):
        assert members[-1] == [f"decoder.{TIED_NAMES[stage]}"]
        assert groups[-1] == ("tied", 4, 2)
        assert set(groups[:-1]) == {("data", 2, 2)} and len(groups) > 2


def _one_stage_breaks(rank):
    engine, _ = stage_engine(pipe=2, accumulation=2)
    engine.train_batch(step_batches(1, 0, 2))
    batches = step_batches(2, 0, 2)
    if rank == 0:
        batches = (batch_of(2, 0, 0) if index == 0 else 1 // 0 for index in range(2))
    try:
        engine.train_batch(batches)
    except ZeroDivisionError:
        torch.distributed.destroy_process_group()  # what ends a process does too
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        return "own error"
    except RuntimeError as error:
        return f"other's: {error}"


def test_an_error_on_one_stage_ends_the_others_when_its_process_does():
    error, others = run_ranks(2, _one_stage_breaks)
    assert error == "own error" and others.startswith("other's")


def _warnings(rank):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron.engine.pipeline").addHandler(handler)
    stage_engine(pipe=2, accumulation=1)
    stage_engine(pipe=2, accumulation=2)
    return lines


def test_too_few_micro_batches_are_worth_one_warning():
    for lines in run_ranks(2, _warnings):
        assert len(lines) == 1 and "gradient_accumulation_steps" in lines[0]
