"""Every configuration we ship loads, and every command the README shows is one that would start."""

import re
import shlex
from pathlib import Path

import pytest

from megatron.neox_arguments import load_args

ROOT = Path(__file__).resolve().parents[1]
OVERLAYS = {"overlap.yml", "wandb.yml", "cpu.yml"}


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.yml")))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_shipped_configuration_loads(name, world_size):
    files = ["bench_20M.yml", name] if name in OVERLAYS else [name]
    if name == "cpu.yml":
        files = ["quickstart.yml", name]
    args = load_args(files, conf_dir=ROOT / "configs", world_size=world_size)
    assert args.training.train_batch_size % world_size == 0


def _commands(text):
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.startswith("python ./deepy.py")]


@pytest.mark.parametrize("command", _commands((ROOT / "README.md").read_text()))
def test_a_command_of_the_readme_would_start(command):
    words = shlex.split(command)
    assert words[:3] == ["python", "./deepy.py", "train.py"]
    overrides = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    files = [word for word in words if word.endswith(".yml")]
    assert load_args([ROOT / file for file in files], overrides=overrides, world_size=2)


def test_the_tree_of_the_readme_is_there():
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2]
    block = re.search(r"^```\n(.*?)^```", tree, re.M | re.S)
    assert block is not None
    for line in block[1].splitlines():
        parent = ROOT / "megatron" if line.startswith("  ") else ROOT
        for name in re.split(r"\s{2,}", line.strip())[0].split():
            assert (parent / name).exists(), name
