"""Signals to deepy: workers hear of them once and end in order, and none outlives it."""

import os
import signal
import sys
import threading

import psutil
import pytest

from megatron.launch.supervise import supervise
from tests.launch.runs import DEEPY, WORKER, lives, ready, start


@pytest.fixture
def begin(config):
    """Start a run and return it with its workers, once both are up. What is left of it ends with the test."""
    started, of_workers = [], []

    def begin(behaviour):
        process = start(
            [*DEEPY, WORKER, str(config / "odd name.yml"), "--num_gpus", "2"], behaviour, TMPDIR=str(config)
        )
        started.append(process)
        workers = ready([process.stdout.readline(), process.stdout.readline()])
        of_workers.extend(worker["pid"] for worker in workers)
        return process, [worker["pid"] for worker in workers]

    yield begin
    for process in started:
        process.kill()
    for worker in filter(lives, of_workers):
        os.kill(worker, signal.SIGKILL)
    for process in started:
        process.communicate(timeout=60)


def hear(process, text):
    """Wait until both workers have said `text`."""
    assert [process.stdout.readline() for _ in range(2)] == [text] * 2


def test_sigterm_reaches_each_worker_too(begin):
    process, workers = begin("listen,listen")
    process.terminate()
    hear(process, "heard SIGTERM\n")
    assert process.wait(timeout=60) == 75
    assert not any(map(lives, workers))


def test_ctrl_c_reaches_each_worker_once_and_a_saved_run_ends_with_75(begin):
    process, workers = begin("save,save")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert (out, err) == ("heard SIGINT\n" * 2, "")
    assert not any(map(lives, workers))


def test_the_third_ctrl_c_ends_workers_that_do_not_listen(begin):
    process, workers = begin("stubborn,stubborn")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        hear(process, "heard SIGINT\n")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not any(map(lives, workers))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_workers_do_not_outlive_a_deepy_that_is_killed(begin):
    process, workers = begin("wait,wait")
    watched = [psutil.Process(pid) for pid in workers]
    process.kill()
    process.wait(timeout=60)
    psutil.wait_procs(watched, timeout=60)
    assert not any(map(lives, workers))


def test_workers_do_not_outlive_a_launcher_that_is_killed(begin):
    process, workers = begin("wait,wait")
    os.kill(psutil.Process(workers[0]).ppid(), signal.SIGKILL)
    assert process.wait(timeout=60) == 137
    assert not any(map(lives, workers))


LAUNCHER = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR2})
sys.stdout.write("up\\n"); sys.stdout.flush()
sys.exit(signal.sigwait({signal.SIGTERM, signal.SIGINT, signal.SIGUSR2}))
"""


@pytest.mark.parametrize(
    ("sent", "has_workers", "heard"),
    [
        (signal.SIGINT, False, signal.SIGTERM),  # nobody to save yet: the launcher itself is ended
        (signal.SIGINT, True, signal.SIGINT),
        (signal.SIGHUP, True, signal.SIGTERM),  # the terminal was closed: save, rather than die or live on unseen
        (signal.SIGUSR2, True, signal.SIGUSR2),
    ],
)
def test_who_hears_what(sent, has_workers, heard, tmp_path):
    fifo = tmp_path / "up"
    os.mkfifo(fifo)

    def send_when_up():
        with fifo.open() as lines:
            assert lines.readline() == "up\n"
            os.kill(os.getpid(), sent)

    sender = threading.Thread(target=send_when_up)
    sender.start()
    command = ["sh", "-c", f'exec "$0" -c "$1" > "{fifo}"', sys.executable, LAUNCHER]
    ended = supervise(command, dict(os.environ), lambda pid: [pid] if has_workers else None)
    sender.join()
    assert ended.status == heard
    assert ended.received is sent


def test_handlers_are_put_back(tmp_path):
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert supervise(["true"], dict(os.environ), lambda pid: None).status == 0
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
