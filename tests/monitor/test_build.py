import json
import subprocess
import sys

import pytest

from megatron.monitor.build import build_sinks
from megatron.monitor.jsonl import JsonlSink
from megatron.monitor.sink import Sink, Sinks
from megatron.monitor.tensorboard_sink import TensorBoardSink
from megatron.neox_arguments.monitor import MonitorArgs
from tests.monitor.examples import TRAINING
from tests.monitor.terminal import run_on_terminal, run_piped

# Three steps of ten, the last one logged.
THREE_STEPS = """
import sys
from pathlib import Path
from dataclasses import replace
from megatron.monitor.build import build_sinks
from megatron.monitor.log import setup_logging
from megatron.neox_arguments.monitor import MonitorArgs
from tests.monitor.examples import TRAINING, VALIDATION

setup_logging(0)
sinks = build_sinks(
    MonitorArgs(log_dir=sys.argv[1]), is_rank_0=True, start_iteration=0, total_iterations=10, config={}
)
for iteration in (1, 2, 3):
    sinks.step(iteration)
sinks.training(replace(TRAINING, iteration=3))
sinks.validation(replace(VALIDATION, iteration=3))
sinks.step(4)
sinks.close()
"""
TRAINING_TEXT = "INFO iteration 3/10 | loss 0.3000"
VALIDATION_TEXT = "INFO iteration 3/10 | valid loss 2.3000"


def is_whole_line(text, lines):
    return any(text in line and line.startswith("20") for line in lines)


def test_on_a_terminal_a_bar_moves_and_lines_stand_above_it(tmp_path):
    streams = run_on_terminal(THREE_STEPS, str(tmp_path), is_stdout_too=True, environ={"TERM": "xterm"})
    shown = streams.stderr.replace("\r\n", "\n")
    drawn = [part.strip("\r\n\x1b[A ") for line in shown.split("\n") for part in line.split("\r")]
    assert is_whole_line(TRAINING_TEXT, drawn)
    assert is_whole_line(VALIDATION_TEXT, drawn)
    assert any("0/10" in part and "%|" in part for part in drawn)
    assert any("/10 [" in part and "loss 0.3000" in part for part in drawn)


def test_lines_go_to_a_file_while_the_bar_stays_on_the_terminal(tmp_path):
    streams = run_on_terminal(THREE_STEPS, str(tmp_path), is_stdout_too=False, environ={"TERM": "xterm"})
    lines = streams.stdout.splitlines()
    assert [TRAINING_TEXT in lines[0], VALIDATION_TEXT in lines[1], len(lines)] == [True, True, 2]
    assert "\r" not in streams.stdout
    assert "%|" in streams.stderr
    assert "iteration" not in streams.stderr


def test_in_a_file_there_are_plain_lines_only(tmp_path):
    streams = run_piped(THREE_STEPS, str(tmp_path))
    assert len(streams.stdout.splitlines()) == 2
    assert not {"\r", "\x1b"} & set(streams.stdout)
    assert streams.stderr == ""
    assert [json.loads(line)["iteration"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [3, 3]


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"TERM": "xterm", "CI": "true"}])
def test_ci_and_dumb_terminals_get_no_bar_and_nobody_gets_colour(tmp_path, environ):
    streams = run_on_terminal(THREE_STEPS, str(tmp_path), is_stdout_too=True, environ=environ)
    assert TRAINING_TEXT in streams.stderr
    assert "%|" not in streams.stderr
    assert "\x1b" not in streams.stderr


def test_other_ranks_have_no_sinks(tmp_path):
    args = MonitorArgs(log_dir=str(tmp_path / "logs"), tensorboard_dir=str(tmp_path / "tb"), use_wandb=True)
    sinks = build_sinks(args, is_rank_0=False, start_iteration=0, total_iterations=1, config={})
    sinks.training(TRAINING)
    sinks.close()
    assert sinks.sinks == ()
    assert not list(tmp_path.iterdir())


def test_each_folder_argument_brings_its_sink(tmp_path):
    args = MonitorArgs(log_dir=str(tmp_path / "logs"), tensorboard_dir=str(tmp_path / "tb"))
    sinks = build_sinks(args, is_rank_0=True, start_iteration=0, total_iterations=1, config={})
    sinks.close()
    kinds = {type(sink) for sink in sinks.sinks}
    assert {JsonlSink, TensorBoardSink} <= kinds


def test_heavy_libraries_are_imported_by_the_sinks_that_need_them(tmp_path):
    script = f"""
import sys
from megatron.monitor.build import build_sinks
from megatron.neox_arguments.monitor import MonitorArgs
args = MonitorArgs(log_dir={str(tmp_path)!r})
build_sinks(args, is_rank_0=True, start_iteration=0, total_iterations=1, config={{}}).close()
print(sorted({{"wandb", "tensorboard", "tqdm", "torch"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_one_sink_failing_to_close_leaves_none_open():
    closed = []

    class Bad(Sink):
        def close(self, *, failed=False):
            raise OSError("disk full")

    class Good(Sink):
        def close(self, *, failed=False):
            closed.append(failed)

    with pytest.raises(OSError, match="disk full"):
        Sinks([Good(), Bad(), Good()]).close(failed=True)
    assert closed == [True, True]
