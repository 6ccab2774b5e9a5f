"""What shows only after hundreds of steps: on still equals off, ranks have not drifted apart, memory does not grow."""

import resource

import pytest
import torch

from megatron.optimizer.loss_scale import DynamicLossScale
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import Options, Trainer, assert_same_bits

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _train(rank, dtype, num_steps):
    runs = []
    for overlap in (True, False):
        scale = DynamicLossScale(2.0**16, window=50, hysteresis=2, minimum=1.0) if dtype is torch.float16 else None
        trainer = Trainer(Options(overlap=overlap, dtype=dtype, tied=True, accumulation=2), loss_scale=scale)
        rows, memory_kib = [], []
        for step in range(1, num_steps + 1):
            loss, outcome = trainer.step(step % 20)
            rows.append((loss, float(outcome.grad_norm), outcome.loss_scale, float(outcome.skipped)))
            memory_kib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        runs.append((trainer.weights(), rows, memory_kib))
    return runs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contract_01_and_36_500_steps_on_equal_500_steps_off_and_nothing_grows(dtype):
    ranks = run_ranks(3, _train, dtype, 500, timeout_s=280)
    weights_of_rank_0 = ranks[0][0][0]
    for (weights_on, rows_on, memory_on), (weights_off, rows_off, _) in ranks:
        assert_same_bits(weights_on, weights_off)
        assert_same_bits(weights_on, weights_of_rank_0)
        assert rows_on == rows_off
        assert rows_on[-1][0] < rows_on[0][0]
        # The first hundred steps see every batch five times and fill every cache.
        assert memory_on[-1] - memory_on[100] < 4096
