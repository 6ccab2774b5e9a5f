"""deepy for real, with workers that do no more than end in different ways."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WORKER = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from megatron.errors import DataError
from megatron.launch.command_line import arguments_from_command_line
from megatron.launch.exit_status import run_worker

def main():
    args, rank = arguments_from_command_line(sys.argv[1:], "")
    way = args.data.split
    folder = args.monitor.log_dir
    open(os.path.join(folder, f"pid_{{rank.rank}}"), "w").write(str(os.getpid()))
    if way == "user error":
        raise DataError("the same on every rank")
    if way == "fault":
        raise RuntimeError("broken")
    if way == "killed" and rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if way in ("waits", "killed"):
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        print("waiting", flush=True)
        signal.pause()
        return 75
    return 0

run_worker(main)
"""


@pytest.fixture
def deepy(tmp_path):
    folder = tmp_path / "a folder with 'quotes' and ünïcode"
    folder.mkdir()
    script = folder / "worker.py"
    script.write_text(WORKER)
    config = folder / "a.yml"
    config.write_text(
        "{num_layers: 1, hidden_size: 8, num_attention_heads: 1, seq_length: 8, train_iters: 1, "
        "optimizer: {params: {lr: 1e-3}}, train_micro_batch_size_per_gpu: 1}"
    )

    def command(way, *options):
        deepy = [sys.executable, str(ROOT / "deepy.py"), str(script), str(config), "--num_gpus", "2"]
        return [*deepy, "--set", f"split={way}", "--set", f"log_dir={folder}", *options]

    command.folder = folder
    return command


def _run(command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _no_worker_lives(folder):
    for path in folder.glob("pid_*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


@pytest.mark.parametrize(("way", "status"), [("well", 0), ("user error", 2), ("fault", 1)])
def test_statuses_are_handed_on(deepy, way, status):
    done = _run(deepy(way))
    assert done.returncode == status, done.stderr
    _no_worker_lives(deepy.folder)
    if way == "user error":
        assert done.stderr.count("the same on every rank") == 1
        assert "Traceback" not in done.stderr and "megatron_config" not in done.stderr
    if way == "fault":
        assert "RuntimeError: broken" in done.stderr


def test_a_killed_worker_is_a_fault_and_the_others_are_ended(deepy):
    done = _run(deepy("killed"))
    assert done.returncode not in (0, 2, 75)
    _no_worker_lives(deepy.folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_workers_and_their_75_comes_back(deepy, number):
    process = subprocess.Popen(deepy("waits"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    waiting = 0
    for line in process.stdout:
        waiting += "waiting" in line
        if waiting == 2:
            break
    process.send_signal(number)
    process.stdout.read()
    assert process.wait(timeout=60) == 75
    _no_worker_lives(deepy.folder)


def test_two_runs_on_one_host_do_not_meet(deepy):
    processes = [subprocess.Popen(deepy("well")) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nowhere.py", "a.yml"], "nowhere.py"),
        (["train.py", "nowhere.yml"], "nowhere.yml"),
        (["train.py"], "configuration"),
        (["train.py", "configs/quickstart.yml", "--set", "num_layerz=1"], "num_layers"),
    ],
)
def test_what_is_wrong_before_anything_starts_is_one_message_and_status_2(arguments, word):
    done = subprocess.run(
        [sys.executable, "deepy.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert word in done.stderr and "Traceback" not in done.stderr
