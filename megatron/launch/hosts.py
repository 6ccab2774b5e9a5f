"""Several hosts: who they are, and DeepSpeed's runner that reaches them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.launch.local import num_local_workers
from megatron.neox_arguments.launch import LaunchArgs

_HOST_LINE = re.compile(r"^(?P<host>\S+)\s+slots=(?P<slots>\d+)\s*$")


def uses_several_hosts(launch: LaunchArgs) -> bool:
    """Whether the run needs a launcher that reaches other hosts."""
    return bool(launch.hostfile or launch.force_multi or launch.deepspeed_slurm or launch.deepspeed_mpi)


def planned_world_size(launch: LaunchArgs) -> int:
    """Return the number of processes of the run. Raises ConfigError for a hostfile that cannot be used."""
    if not launch.hostfile:
        return num_local_workers(launch) * max(launch.num_nodes, 1)
    slots = read_hostfile(launch.hostfile)
    chosen = list(slots.values())[: launch.num_nodes if launch.num_nodes > 0 else None]
    return sum(min(count, launch.num_gpus or count) for count in chosen)


def read_hostfile(path: str) -> dict[str, int]:
    """Return the slots of each host, in the order of the file. Raises ConfigError naming the line that is off."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hostfile {path} cannot be read: {error}") from error
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _HOST_LINE.match(content)
        if match is None or match["host"] in slots:
            raise ConfigError(f"{path}:{number}: '{content}': write each host once, as 'host slots=N'")
        slots[match["host"]] = int(match["slots"])
    if not slots:
        raise ConfigError(f"hostfile {path} names no host")
    return slots


def runner_command(script: str, worker_arguments: Sequence[str], launch: LaunchArgs) -> list[str]:
    """Return the command of DeepSpeed's runner for this run."""
    options: list[tuple[str, object]] = [
        ("--hostfile", launch.hostfile),
        ("--include", launch.include),
        ("--exclude", launch.exclude),
        ("--num_nodes", launch.num_nodes if launch.num_nodes > 0 else None),
        ("--num_gpus", launch.num_gpus),
        ("--master_addr", launch.master_addr),
        ("--master_port", launch.master_port),
        ("--launcher", _launcher(launch)),
        ("--launcher_args", _launcher_arguments(launch)),
    ]
    given = [f"{name}={value}" for name, value in options if value]
    switches = ["--force_multi"] if launch.force_multi or launch.deepspeed_slurm or launch.deepspeed_mpi else []
    switches += ["--no_ssh_check"] if launch.no_ssh_check else []
    return [sys.executable, "-m", "deepspeed.launcher.runner", *given, *switches, script, *worker_arguments]


def run_on_hosts(command: Sequence[str]) -> int:
    """Run DeepSpeed's runner and return its status."""
    return subprocess.run(command, check=False).returncode


def _launcher(launch: LaunchArgs) -> str:
    if launch.deepspeed_slurm:
        return "slurm"
    return "openmpi" if launch.deepspeed_mpi else launch.launcher


def _launcher_arguments(launch: LaunchArgs) -> str:
    given = {"comment": launch.comment, "account": launch.account}
    return " ".join(f"--{name}={value}" for name, value in given.items() if value)
