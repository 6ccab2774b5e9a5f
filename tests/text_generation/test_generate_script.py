"""`generate.py` with the configuration of a training run, whatever its parallelism, alone and under a launcher."""

import json
import subprocess
import sys

import pytest

from generate import generate
from megatron.errors import CheckpointError
from megatron.launch.command_line import arguments_from_command_line
from megatron.launch.ports import free_port
from tests.distributed.ranks import run_ranks
from tests.training.in_process import train_runs
from tests.training.runs import ROOT, SMOKE, environment, write_corpus

pytestmark = pytest.mark.distributed

# As a run on many more processes than there are here would be configured: 8 x 2 x 2 of them.
LARGE = {
    "pipe_parallel_size": 2,
    "model_parallel_size": 2,
    "sequence_parallel": True,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "num_gpus": 8,
    "num_nodes": 4,
    "world_size": 32,
    "zero_optimization": {"stage": 1},
}
# 512 entries are 520 rows with one tensor rank and 560 with two.
VOCABULARY = {"make_vocab_size_divisible_by": 40}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of two stages and two tensor ranks, and of one process."""
    folder = tmp_path_factory.mktemp("trained")
    settings = {
        **VOCABULARY,
        "data_path": str(write_corpus(folder)),
        "hidden_dropout": 0.0,
        "train_iters": 30,
        "lr_decay_iters": 30,
        "eval_iters": 0,
    }
    large = {"pipe_parallel_size": 2, "model_parallel_size": 2, "gradient_accumulation_steps": 2}
    run_ranks(4, train_runs, [{**settings, **large, "save": str(folder / "large")}])
    # Padded alike: starting weights depend on the padded shape.
    run_ranks(1, train_runs, [{**settings, "make_vocab_size_divisible_by": 80, "save": str(folder / "small")}])
    return {name: folder / name for name in ("large", "small")}


def options(load, output, **settings):
    chosen = {
        **VOCABULARY,
        "load": str(load),
        "sample_output_file": str(output),
        "num_samples": 2,
        "maximum_tokens": 6,
        "return_logits": True,
        **settings,
    }
    return [str(ROOT / SMOKE), *(f"--set={key}={json.dumps(value)}" for key, value in chosen.items())]


def samples(load, output, **settings):
    args, _ = arguments_from_command_line(options(load, output, **settings), None, whole_model=True)
    generate(args)
    return read(output)


def read(output):
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "duration_seconds"} for line in lines]


def test_any_configuration_and_any_checkpoint_give_the_same_texts(trained, tmp_path, caplog):
    caplog.set_level("INFO")
    from_large = samples(trained["large"], tmp_path / "large", **LARGE)
    assert len(from_large) == 2 and from_large[0]["length"] > 0
    # The configuration's own padding is the checkpoint's, so nothing is resized.
    assert "resized" not in caplog.text
    assert samples(trained["large"], tmp_path / "large on one") == from_large
    assert "was padded to 560" in caplog.text and "is to 520 here" in caplog.text
    from_small = samples(trained["small"], tmp_path / "small", **LARGE)
    for sample, other in zip(from_small, from_large, strict=True):
        assert sample["text"] == other["text"]
        for row, other_row in zip(sample["logits"], other["logits"], strict=True):
            assert row == pytest.approx(other_row, abs=1e-3)


def test_sampling_and_caching_do_not_depend_on_the_configured_parallelism(trained, tmp_path):
    drawn = {"temperature": 1.0, "top_p": 0.9, "recompute": True, "return_logits": False}
    with_large = samples(trained["large"], tmp_path / "a", **drawn, **LARGE)
    assert with_large == samples(trained["large"], tmp_path / "b", **{**drawn, "recompute": False})


def test_another_tokenizer_or_model_is_refused_by_name(trained, tmp_path):
    with pytest.raises(CheckpointError, match="hidden_size was 32 and is 64"):
        samples(trained["large"], tmp_path / "a", **LARGE, hidden_size=64)


def run(command, **variables):
    environ = {**environment(), **variables}
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_deepy_starts_one_process_whatever_the_configuration_says(trained, tmp_path):
    output = tmp_path / "samples"
    command = [sys.executable, "deepy.py", "generate.py", *options(trained["large"], output, **LARGE)]
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert read(output) == samples(trained["large"], tmp_path / "alone", **LARGE)


def test_of_several_processes_the_first_generates_and_all_end_well(trained, tmp_path):
    output = tmp_path / "samples"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={free_port()}"]
    done = run([*launcher, "generate.py", *options(trained["large"], output, **LARGE)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generating in the first of 3 processes" in done.stdout + done.stderr
    assert read(output) == samples(trained["large"], tmp_path / "alone", **LARGE)
