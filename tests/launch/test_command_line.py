"""The command lines of deepy and of workers: what they take, what they refuse, and how."""

import subprocess
import sys

import pytest

from megatron.errors import ConfigError
from megatron.launch.command_line import arguments_from_command_line
from megatron.launch.hand_over import pack
from tests.launch.runs import DEEPY, ODD_PATH, ROOT, WORKER, environment, ready, start


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


def deepy(*arguments):
    command = [*DEEPY, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment("done"), cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize(
    "order",
    [
        ["-d", "{folder}", "odd name.yml", "--set", "seed=7", "more"],
        ["odd name.yml", "-d", "{folder}", "more", "--set", "seed=7"],
        ["--set=seed=7", "odd name", "more.yml", "--conf_dir={folder}"],
    ],
)
def test_options_stand_anywhere(config, order):
    (config / "more.yml").write_text("train_iters: 6")
    args, rank = arguments_from_command_line([part.format(folder=config) for part in order], None)
    assert (args.training.seed, args.data.data_path) == (7, ODD_PATH)
    assert (rank.rank, rank.world_size) == (0, 1)


def test_a_handed_over_configuration_equals_the_files(config):
    argv = [str(config / "odd name.yml"), "--set", "seed=7"]
    read, _ = arguments_from_command_line(argv, None)
    handed, _ = arguments_from_command_line(["--local_rank=0", pack(read.flat)], None)
    assert handed.model_dump(exclude={"origins"}) == read.model_dump(exclude={"origins"})


@pytest.mark.parametrize("more", [["a.yml"], ["--set", "seed=1"]])
def test_a_handed_over_configuration_is_whole(config, more):
    read, _ = arguments_from_command_line([str(config / "odd name.yml")], None)
    with pytest.raises(ConfigError, match="whole configuration"):
        arguments_from_command_line([pack(read.flat), *more], None)


def test_no_configuration_is_refused():
    with pytest.raises(ConfigError, match="name at least one YAML file"):
        arguments_from_command_line([], None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: script"),
        (["train.py"], "name at least one YAML file"),
        (["train.py", "{config}", "--num_gpu", "2"], "unrecognized arguments: --num_gpu"),
        (["train.py", "{config}", "--num_gpus", "two"], "invalid int value: 'two'"),
    ],
)
def test_deepy_shows_its_usage_when_used_wrongly(config, arguments, said):
    done = deepy(*[part.format(config=config / "odd name.yml") for part in arguments])
    assert done.returncode == 2
    assert done.stderr.startswith("usage: deepy.py") and said in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian.py", "{config}"], "script trian.py does not exist"),
        (["train.py", "no such.yml"], "no such.yml"),
        (["train.py", "{config}", "--set", "hiden_size=3"], "hidden_size"),
        (["train.py", "{config}", "--num_gpus", "0"], "num_gpus"),
        (["train.py", "{config}", "-H", "no: such #hosts"], "hostfile no: such #hosts cannot be read"),
        (
            ["train.py", "{config}", "--set", "master_port=1", "--set", "hostfile=x", "--set", "num_nodes=2"],
            "hostfile x",
        ),
    ],
)
def test_deepy_refuses_with_one_message(config, arguments, said):
    done = deepy(*[part.format(config=config / "odd name.yml") for part in arguments])
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert done.stderr.count("\n") == 1


def test_workers_of_torchrun_read_the_files_and_speak_once(config):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    process = start([*torchrun, WORKER, str(config / "odd name.yml")], "config,config", TMPDIR=str(config))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1  # torchrun's, for everything
    assert err.count("the lamp is not a lamp") == 1
    assert {worker["path"] for worker in ready(out)} == {ODD_PATH}


def test_launching_imports_no_torch():
    program = (
        "import pkgutil, sys, deepy, train, megatron.launch\n"
        "for module in pkgutil.iter_modules(megatron.launch.__path__, 'megatron.launch.'): __import__(module.name)\n"
        "print(sorted({'torch', 'deepspeed', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
