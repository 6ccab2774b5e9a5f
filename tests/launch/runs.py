"""Starting deepy, or another launcher, with the tiny worker."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
DEEPY = [sys.executable, str(ROOT / "deepy.py")]
WORKER = str(Path(__file__).with_name("worker.py"))

# What a shell, a launcher or an option parser may take apart.
ODD_PATH = "a  b/ü ñ 漢 🙂/'\"$HOME`;#&=*\\ --set x=1"

# Variables of launchers that started these tests would reach the workers.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "CUDA_VISIBLE", "OMP_")


def environment(behaviour: str, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {**kept, "PYTHONPATH": str(ROOT), "BEHAVIOUR": behaviour, **more}


def start(command: list[str], behaviour: str, **more: str) -> subprocess.Popen[str]:
    """Start a launcher in a session of its own, as a terminal's foreground group is."""
    return subprocess.Popen(
        command,
        env=environment(behaviour, **more),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ready(lines: str | list[str]) -> list[dict]:
    """What workers said of themselves, by rank."""
    lines = lines.splitlines() if isinstance(lines, str) else lines
    said = [ast.literal_eval(line.removeprefix("ready ").strip()) for line in lines if line.startswith("ready ")]
    return sorted(said, key=lambda worker: worker["rank"])


def lives(pid: int) -> bool:
    """Whether a process runs; one that ended and nobody has reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
