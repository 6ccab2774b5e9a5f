"""Contract line 34: a rank that hangs or dies is named by the others, with the bucket they wait for."""

import contextlib
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.data_parallel.roll_call import RollCall
from megatron.errors import LostRankError
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import Options, Trainer

pytestmark = pytest.mark.distributed

HUNG = 1


def _message(rank, folder, how, zero_stage):
    """Train two steps; in the third rank 1 goes away in the middle of its backward. Return what the others say."""
    store = dist.FileStore(f"{folder}/roll_call", dist.get_world_size())
    options, patient = Options(zero_stage=zero_stage), RollCall(store, patience_s=6.0)
    trainer = Trainer(options, roll_call=patient, timeout=timedelta(seconds=4))
    for step in (1, 2):
        trainer.step(step)
    if rank != HUNG:
        try:
            trainer.step(3)
        except LostRankError as error:
            store.set(f"told/{rank}", "")
            return str(error)
        return "no error"
    if how == "dies":
        dist.destroy_process_group(trainer.group.handle)
    else:
        # Launches its first bucket and no other, and hangs for as long as anybody waits for it.
        buckets, real = trainer.reducer._buckets, type(trainer.reducer._buckets[0]).launch
        buckets[1].launch = lambda: store.wait(["told/0", "told/2"], timedelta(seconds=60)) or real(buckets[1])
        with contextlib.suppress(LostRankError, RuntimeError):
            trainer.step(3)
    return None


@pytest.mark.parametrize(("how", "zero_stage"), [("hangs", 0), ("dies", 0), ("hangs", 2)])
def test_contract_34_the_others_stop_and_name_bucket_parameters_and_rank(tmp_path, how, zero_stage):
    on_0, _, on_2 = run_ranks(3, _message, str(tmp_path), how, zero_stage)
    for message in (on_0, on_2):
        assert "rank 1 had not launched it" in message
        assert "gradient bucket" in message and ("weight" in message or "bias" in message)
