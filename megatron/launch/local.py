"""Worker processes on this host, started by DeepSpeed's launcher."""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from megatron.errors import EXIT_OK, EXIT_RUN_AGAIN, EXIT_USER_ERROR, ConfigError
from megatron.launch.devices import LocalDevices, local_devices
from megatron.launch.environment import LOOPBACK
from megatron.launch.exit_record import reason_for
from megatron.launch.exit_status import STATUS_FOLDER_VARIABLE, status_of_run
from megatron.launch.ports import free_port, is_free
from megatron.launch.supervise import supervise
from megatron.neox_arguments.launch import LaunchArgs

_LAUNCHER = "deepspeed.launcher.launch"


def num_local_workers(launch: LaunchArgs, devices: LocalDevices | None = None) -> int:
    """Return `num_gpus`, or the number of devices the run may use, or 1.

    Raises ConfigError when `num_gpus` is more than the devices of a host that has some.
    """
    devices = devices or local_devices()
    if launch.num_gpus and devices.num_usable and launch.num_gpus > devices.num_usable and not _on_cpu():
        limit = "" if devices.visible is None else f" (CUDA_VISIBLE_DEVICES is {','.join(devices.visible)})"
        raise ConfigError(f"num_gpus is {launch.num_gpus}, but this host has {devices.num_usable} to use{limit}")
    return launch.num_gpus or devices.num_usable or 1


def local_command(script: str, worker_arguments: Sequence[str], slots: Sequence[int], launch: LaunchArgs) -> list[str]:
    """Return the command that starts a process of `script` on this host for each of `slots`, devices by number.

    Raises ConfigError when `master_port` is set to one that is in use.
    """
    if launch.master_port is not None and not is_free(launch.master_port):
        raise ConfigError(
            f"master_port {launch.master_port} is in use on this host: set another, or none for a free one"
        )
    world = {"localhost": local_devices().names(slots)}
    return [
        sys.executable,
        "-m",
        _LAUNCHER,
        f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}",
        "--node_rank=0",
        f"--master_addr={launch.master_addr or LOOPBACK}",
        f"--master_port={launch.master_port or free_port()}",
        "--log_level=critical",  # it would print the configuration once a worker, and again when one fails
        script,
        *worker_arguments,
    ]


def run_local(command: Sequence[str], script: str, num_workers: int) -> int:
    """Run a launcher of `num_workers` processes of `script` and return the status of the run.

    SIGINT, SIGTERM and SIGUSR2 ask the workers to save and end.
    """
    with tempfile.TemporaryDirectory(prefix="neox-") as name:
        folder = Path(name)

        def find_workers(launcher: int) -> list[int] | None:
            workers = _workers(launcher, script)
            all_started = len(workers) == num_workers or any(folder.glob("status_*"))
            return workers if all_started else None

        environment = worker_environment(num_workers) | {STATUS_FOLDER_VARIABLE: name}
        ended = supervise(command, environment, find_workers)
        status = status_of_run(folder, num_workers, ended.status, ended.received)
        is_silent = len(list(folder.glob("status_*"))) < num_workers and ended.received is None
        if is_silent and status not in (EXIT_OK, EXIT_USER_ERROR, EXIT_RUN_AGAIN):
            sys.stderr.write(f"error: {reason_for(status)}\n")  # who is killed says nothing
        return status


def worker_environment(num_workers: int) -> dict[str, str]:
    """Return this process's environment with what it leaves open set for `num_workers` processes on this host."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_process(num_workers)))
    if not local_devices().any_accelerator:
        environment.setdefault("DS_ACCELERATOR", "cpu")  # spares a search, and a warning from each process
    return environment


def threads_per_process(num_local_processes: int) -> int:
    """Return the share of this host's usable cores that each of its processes has, at least 1."""
    try:
        num_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        num_cores = os.cpu_count() or 1
    return max(1, num_cores // num_local_processes)


def _on_cpu() -> bool:
    return os.environ.get("DS_ACCELERATOR") == "cpu"


def _workers(launcher: int, script: str) -> list[int]:
    """The launcher's children that run `script`; it starts other programs too while it looks at the host."""
    found: list[int] = []
    try:
        children = psutil.Process(launcher).children()
    except psutil.NoSuchProcess:
        return found
    for child in children:
        try:
            command = child.cmdline()
        except psutil.Error:
            continue
        if script in command and _LAUNCHER not in command:
            found.append(child.pid)
    return found
