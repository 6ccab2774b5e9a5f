"""ZeRO 3 through deepy: rows that say nothing of communication, and the line that says who reduces."""

import pytest

from tests.training.runs import COMMUNICATION, TinyRun, write_corpus

pytestmark = pytest.mark.distributed


def test_a_run_trains_and_says_who_reduces(tmp_path):
    settings = {"overlap_grad_reduce": True, "zero_stage": 3, "ddp_bucket_size": None, "pipe_parallel_size": 1}
    run = TinyRun(write_corpus(tmp_path), tmp_path, settings)
    printed = run.train()
    line = "ZeRO 3: gradients are reduced by DeepSpeed itself; overlap_grad_reduce sets its overlap_comm to true"
    assert printed.count(line) == 1
    assert "WARNING" not in printed
    training = [row for row in run.rows(without=()) if "skipped" in row]
    assert training[-1]["lm_loss"] < training[0]["lm_loss"] - 0.5
    assert all(row[field] is None for row in training for field in COMMUNICATION)
    assert all(row["grad_norm"] > 0.0 and row["skipped"] == 0 and row["loss_scale"] is None for row in training)
