"""Contract line 12: the two copies of a tied weight stay one weight, in every precision and ZeRO stage."""

import hashlib

import pytest
import torch

from megatron.optimizer.loss_scale import DynamicLossScale
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import assert_same_bits
from tests.engine.cells import EPS
from tests.engine.stage_engine import stage_engine, step_batches, weights_of

pytestmark = pytest.mark.distributed

COPIES = ("layers.0.word_embeddings.weight", "layers.5.final_linear.weight")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# How far two stages may be from one after 20 steps: losses, and weights of the order of 0.1. Each half of a tied
# gradient is rounded to the dtype on two stages, their sum on one.
LOSS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
WEIGHT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _freeze_tied(model, grid):
    for name, parameter in model.named_parameters():
        if name.removeprefix("decoder.") in COPIES:
            parameter.requires_grad_(False)


def _run(dtype, num_steps, **options):
    """Train; return losses, a digest of the copy on this rank after every step, the weights, and the steps skipped."""
    scale = DynamicLossScale(2.0**10, window=7, hysteresis=1, minimum=1.0) if dtype is torch.float16 else None
    engine, grid = stage_engine(tied=True, accumulation=2, dtype=dtype, loss_scale=scale, eps=EPS, **options)
    copies = [p for name, p in engine.module.named_parameters() if name.removeprefix("decoder.") in COPIES]
    losses, digests = [], []
    for step in range(1, num_steps + 1):
        losses.append(float(engine.train_batch(step_batches(step % 50, grid.data.rank, 2)).loss))
        engine.optimizer.wait_for_parameters()
        digests.append([hashlib.sha256(copy.detach().view(torch.uint8).numpy()).hexdigest() for copy in copies])
    weights, num_skipped = weights_of(engine), engine.optimizer.progress.num_skipped
    engine.close()
    return losses, digests, weights, num_skipped


def _every_stage(rank, pipe, dtype, num_steps, zero_stages, options=None):
    return [_run(dtype, num_steps, pipe=pipe, zero_stage=zero_stage, **(options or {})) for zero_stage in zero_stages]


def _check_copies(ranks, num_steps):
    for results in zip(*ranks, strict=True):
        losses, digests, _, num_skipped = results[0]
        assert num_skipped < num_steps / 4
        assert len({tuple(digest) for digest in digests}) >= num_steps - num_skipped, "the weight does not train"
        for other_losses, other_digests, *_ in results:
            assert other_losses == losses
            assert other_digests == digests, "copies drifted apart"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contract_12_tied_copies_are_one_weight_over_20_steps_and_equal_one_stage(dtype):
    ranks = run_ranks(4, _every_stage, 2, dtype, 20, (0, 1, 2))
    _check_copies(ranks, 20)
    expected_losses, _, expected, _ = run_ranks(2, _every_stage, 1, dtype, 20, (0,))[0][0]
    for results in ranks:
        for losses, _, weights, _ in results:
            assert losses == pytest.approx(expected_losses, rel=LOSS[dtype])
            for name, weight in weights.items():
                # With one stage head and embedding are one parameter, under the embedding's name.
                one_stage = expected[COPIES[0] if name == COPIES[1] else name]
                torch.testing.assert_close(weight, one_stage, rtol=LOSS[dtype], atol=WEIGHT[dtype], msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contract_12_and_public_failure_tied_copies_do_not_drift_over_500_steps(dtype):
    for zero_stage in (0, 1, 2):
        ranks = run_ranks(4, _every_stage, 2, dtype, 500, (zero_stage,), {"decay": "constant"}, timeout_s=250)
        _check_copies(ranks, 500)
        losses = ranks[0][0][0]
        assert sum(losses[-50:]) < sum(losses[:50])


def _frozen(rank):
    found = []
    for zero_stage in (0, 1, 2):
        for dtype in (torch.float32, torch.bfloat16):
            runs = [
                _run(dtype, 4, pipe=2, zero_stage=zero_stage, overlap=overlap, prepare=_freeze_tied)
                for overlap in (True, False)
            ]
            start = stage_engine(pipe=2, tied=True, dtype=dtype)[0]
            found.append((runs, weights_of(start)))
    return found


def test_contract_12_frozen_tied_weights_stay_as_they_are_and_equal_while_others_train():
    per_rank = run_ranks(2, _frozen)
    for case in zip(*per_rank, strict=True):
        held = []
        for (on, off), start in case:
            assert on[0] == off[0] and len(set(on[0])) == 4
            assert_same_bits(on[2], off[2])
            for name, weight in on[2].items():
                assert torch.equal(weight, start[name]) == (name in COPIES), name
                held += [weight] if name in COPIES else []
        assert len(held) == 2 and torch.equal(*held)
