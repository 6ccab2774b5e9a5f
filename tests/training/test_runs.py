"""Whole runs through deepy: on against off, one process against two, stop and resume, what they leave behind."""

import json
import signal
import subprocess
import sys

import pytest

from megatron.data_parallel.collective import all_reduce_bytes_sent
from tests.training.runs import COMMUNICATION, ROOT, TinyRun, environment, write_corpus

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def straight(prefix, tmp_path_factory):
    """An uninterrupted run on two workers with the reduction under backward."""
    run = TinyRun(prefix, tmp_path_factory.mktemp("straight"), {"overlap_grad_reduce": True})
    run.train()
    return run


def test_on_equals_off_in_every_row(prefix, straight, tmp_path):
    off = TinyRun(prefix, tmp_path, {"overlap_grad_reduce": False})
    off.train()
    assert off.rows() == straight.rows()
    training = [row for row in straight.rows(without=()) if "learning_rate" in row]
    assert [row["iteration"] for row in training] == [1, 2, 3, 4, 5, 6]
    assert training[-1]["lm_loss"] < training[0]["lm_loss"]


def test_rows_say_what_was_sent_and_the_exit_record_how_it_ended(straight):
    training = [row for row in straight.rows(without=()) if "learning_rate" in row]
    # Two layers of 12 H^2 + 13 H, embedding and head of 512 padded rows, and the final norm; H is 32, all in fp32.
    parameters = 2 * (12 * 32 * 32 + 13 * 32) + 2 * 512 * 32 + 2 * 32
    for row in training:
        assert row["grad_reduce_bytes"] == all_reduce_bytes_sent(4 * parameters, 2)
        assert 0.0 <= row["hidden_fraction"] <= 1.0
        assert row["grad_reduce_s"] > 0.0 and row["exposed_grad_reduce_s"] > 0.0
        assert row["loss_scale"] is None and row["mfu"] is None
    record = json.loads((straight.folder / "log files" / "exit.json").read_text())
    assert record == {"code": 0, "reason": "reached train_iters", "iteration": 6, "signal": None}


@pytest.mark.parametrize("tied", [False, True])
def test_two_stages_give_the_losses_of_one(prefix, tmp_path, tied):
    settings = {"gradient_accumulation_steps": 2, "hidden_dropout": 0.0, "no_weight_tying": not tied}
    one = TinyRun(prefix, tmp_path / "one", {**settings, "gradient_clipping": 0.0})
    two = TinyRun(prefix, tmp_path / "two", {**one.settings, "pipe_parallel_size": 2, "overlap_grad_reduce": True})
    one.train(num_workers=1)
    two.train(num_workers=2)
    for alone, staged in zip(one.rows(), two.rows(), strict=True):
        assert staged["lm_loss"] == pytest.approx(alone["lm_loss"], rel=1e-5)
    assert [row["split"] for row in two.rows() if "split" in row] == ["valid", "valid", "test"]
    # Only a tied weight has anybody to be reduced with: the two stages, in fp32.
    sent = {row["grad_reduce_bytes"] for row in two.rows(without=()) if "split" not in row}
    assert sent == ({all_reduce_bytes_sent(4 * 512 * 32, 2)} if tied else {None})


def test_one_process_with_accumulation_gives_the_same_losses(prefix, tmp_path):
    without_dropout = {"overlap_grad_reduce": True, "hidden_dropout": 0.0}
    two = TinyRun(prefix, tmp_path / "two", without_dropout)
    one = TinyRun(prefix, tmp_path / "one", {**without_dropout, "gradient_accumulation_steps": 2})
    two.train()
    command = [sys.executable, "train.py", *one.arguments()]
    subprocess.run(command, env=environment(), cwd=ROOT, check=True, timeout=180, capture_output=True)
    for alone, together in zip(one.rows(without=()), two.rows(without=()), strict=True):
        assert alone["lm_loss"] == pytest.approx(together["lm_loss"], rel=1e-5)
        if "grad_norm" in alone:
            assert alone["grad_norm"] == pytest.approx(together["grad_norm"], rel=1e-4)
            assert all(alone[field] is None for field in COMMUNICATION)


def test_stop_and_resume_with_the_flag_flipped_equals_the_uninterrupted_run(prefix, straight, tmp_path):
    checkpoints = {"save": str(tmp_path / "checkpoints"), "load": str(tmp_path / "checkpoints")}
    first = TinyRun(prefix, tmp_path, {"overlap_grad_reduce": True, "exit_interval": 4, **checkpoints})
    first.train()
    second = TinyRun(prefix, tmp_path, {"overlap_grad_reduce": False, **checkpoints})
    second.train()
    assert second.rows() == straight.rows()


def test_an_interrupt_saves_ends_with_75_and_is_resumed(prefix, straight, tmp_path):
    checkpoints = {"save": str(tmp_path / "checkpoints"), "load": str(tmp_path / "checkpoints")}
    run = TinyRun(prefix, tmp_path, {"overlap_grad_reduce": True, **checkpoints})
    long = run.command("--set", "train_iters=5000", "--set", "lr_decay_iters=6")
    process = subprocess.Popen(
        long, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "iteration 2/" in line:
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 75, rest
    record = json.loads((tmp_path / "log files" / "exit.json").read_text())
    assert record["code"] == 75 and record["signal"] == "SIGINT"
    assert (tmp_path / "checkpoints" / f"global_step{record['iteration']}").is_dir()
    assert "Traceback" not in rest


def test_an_error_of_one_rank_is_the_only_thing_said(prefix, tmp_path):
    broken = tmp_path / "broken"
    data = bytearray(prefix.with_suffix(".bin").read_bytes())
    # Ids past the vocabulary in the documents of one rank: the other rank only loses its peer.
    data[: len(data) // 3] = b"\xff" * (len(data) // 3)
    broken.with_suffix(".bin").write_bytes(data)
    broken.with_suffix(".idx").write_bytes(prefix.with_suffix(".idx").read_bytes())
    printed = TinyRun(broken, tmp_path, {"overlap_grad_reduce": True}).train(status=2)
    errors = [line for line in printed.splitlines() if "INFO" not in line]
    assert len([line for line in errors if line.startswith("error: token id 65535")]) >= 1
    assert "Traceback" not in printed


def test_a_gradient_that_is_not_finite_ends_the_run_with_its_name_and_status_1(prefix, tmp_path):
    settings = {"precision": "fp16", "fp16": {"enabled": True, "loss_scale": 1e12}, "check_for_nan_in_grad": True}
    printed = TinyRun(prefix, tmp_path, settings).train(status=1)
    assert "is not finite, found before it was reduced" in printed
    assert "Traceback" not in printed
