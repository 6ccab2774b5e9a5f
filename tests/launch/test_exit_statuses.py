"""What deepy makes of workers that end in every way. All runs start at once: they must not disturb each other."""

import json
from dataclasses import dataclass

import pytest

from tests.launch.runs import DEEPY, ODD_PATH, WORKER, lives, ready, start


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


CASES = {
    "done,done": 0,
    "again,again": 75,
    "config,config": 2,
    "wait,data": 2,
    "raise,wait": 1,
    "wait,kill": 137,
    "done,kill": 137,
}


@pytest.fixture(scope="module")
def runs(config):
    def command(name):
        logs = f"log_dir={config / 'logs' / name}"
        return [*DEEPY, WORKER, "-d", str(config), "odd name.yml", "--num_gpus", "2", "--set", logs]

    started = {name: start(command(name), name) for name in CASES}
    ended = {}
    for name, process in started.items():
        out, err = process.communicate(timeout=120)
        ended[name] = Ended(process.returncode, out, err)
    return ended


@pytest.mark.parametrize(("behaviour", "status"), CASES.items())
def test_status_is_handed_on_and_nothing_is_left_running(runs, behaviour, status):
    assert runs[behaviour].status == status, runs[behaviour]
    workers = ready(runs[behaviour].out)
    assert workers and not any(lives(worker["pid"]) for worker in workers)


@pytest.mark.parametrize(("behaviour", "status"), CASES.items())
def test_exit_record_agrees(runs, config, behaviour, status):
    record = json.loads((config / "logs" / behaviour / "exit.json").read_text())
    assert record["code"] == status
    assert set(record) == {"code", "reason", "iteration", "signal"}
    assert record["signal"] == ("SIGKILL" if status == 137 else None)


def test_workers_know_their_place_and_get_the_configuration(runs):
    workers = ready(runs["done,done"].out)
    assert [(worker["rank"], worker["size"], worker["path"]) for worker in workers] == [
        (0, 2, ODD_PATH),
        (1, 2, ODD_PATH),
    ]


def test_runs_on_one_host_meet_at_different_ports(runs):
    ports = {behaviour: {worker["port"] for worker in ready(run.out)} for behaviour, run in runs.items()}
    assert all(len(of_run) == 1 for of_run in ports.values())
    assert len(set.union(*ports.values())) == len(CASES)


def test_a_message_of_all_workers_appears_once(runs):
    assert runs["config,config"].err == "error: the lamp is not a lamp\n"


def test_a_message_of_one_worker_is_not_lost(runs):
    assert runs["wait,data"].err == "error: the tape is torn\n"


@pytest.mark.parametrize("behaviour", ["wait,kill", "done,kill"])
def test_a_death_without_a_word_is_named(runs, behaviour):
    assert runs[behaviour].err == "error: a worker was ended by SIGKILL\n"


def test_a_fault_keeps_its_traceback(runs):
    assert "Traceback" in runs["raise,wait"].err and "RuntimeError: a fault" in runs["raise,wait"].err


def test_a_good_run_prints_nothing_of_the_launcher(runs):
    assert runs["done,done"].err == ""
    assert all(line.startswith("ready ") for line in runs["done,done"].out.splitlines())
