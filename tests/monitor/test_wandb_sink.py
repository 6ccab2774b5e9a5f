import subprocess
import sys
from pathlib import Path

import pytest

from megatron.monitor.series import training_series, validation_series
from tests.monitor.examples import TRAINING, VALIDATION
from tests.monitor.wandb_file import exit_code, history, run_header

# A process of its own for each run, as in life: wandb keeps state in the process and hooks its exit.
RUN = """
import sys
from dataclasses import replace
from megatron.errors import ConfigError
from megatron.monitor.wandb_sink import WandbSink
from megatron.neox_arguments.monitor import MonitorArgs
from tests.monitor.examples import TRAINING, VALIDATION

args = MonitorArgs(
    log_dir=sys.argv[1], use_wandb=True, wandb_project="neox-tests", wandb_group="a group", wandb_team="a team",
    wandb_run_name="a name", wandb_host=sys.argv[2],
)
start_iteration, failed = int(sys.argv[3]), sys.argv[4] == "failed"
try:
    sink = WandbSink(args, start_iteration=start_iteration, config={"hidden_size": 384})
except ConfigError as error:
    print(error)
    sys.exit(error.exit_status)
sink.training(replace(TRAINING, iteration=start_iteration + 1))
sink.training(replace(TRAINING, iteration=start_iteration + 2))
sink.validation(replace(VALIDATION, iteration=start_iteration + 2))
sink.close(failed=failed)
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs the script; gives the offline files in the order of the runs."""
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    seen: list[Path] = []

    def run(start_iteration=0, ending="done"):
        argv = [sys.executable, "-c", RUN, str(tmp_path), "http://127.0.0.1:9", str(start_iteration), ending]
        result = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        seen.extend(path for path in tmp_path.glob("wandb/offline-run-*/*.wandb") if path not in seen)
        return result, list(seen)

    return run


def test_an_offline_run_holds_the_values_and_a_resumed_one_rejoins_it(train):
    result, _ = train()
    assert result.returncode == 0, result.stderr
    result, files = train(start_iteration=2, ending="failed")
    assert result.returncode == 0, result.stderr

    first, resumed = files
    series = training_series(TRAINING)
    assert history(first) == [{"_step": 1, **series}, {"_step": 2, **series, **validation_series(VALIDATION)}]
    assert [row["_step"] for row in history(resumed)] == [3, 4]
    header = run_header(first)
    assert (header.project, header.entity, header.run_group) == ("neox-tests", "a team", "a group")
    assert header.display_name == "a name"
    assert {item.key: item.value_json for item in header.config.update}["hidden_size"] == "384"
    assert run_header(resumed).run_id == header.run_id
    assert (header.resumed or header.resume, run_header(resumed).resume) == (False, True)
    assert (exit_code(first), exit_code(resumed)) == (0, 1)


def test_a_fresh_run_in_the_same_folder_is_another_run(train):
    train()
    _, (first, second) = train()
    assert run_header(first).run_id != run_header(second).run_id


def test_no_access_is_one_clear_message(train, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    result, _ = train()
    assert result.returncode == 2
    assert result.stdout.startswith("use_wandb: wandb cannot start a run in project 'neox-tests' on http://127.0.0.1:9")
    assert "WANDB_MODE=offline" in result.stdout


def test_the_environments_project_wins(train, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "from-environment")
    _, (path,) = train()
    assert run_header(path).project == "from-environment"
