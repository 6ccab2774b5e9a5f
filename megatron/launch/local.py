"""Worker processes on this host, started by DeepSpeed's launcher."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megatron.launch.environment import free_port
from megatron.launch.exit_status import STATUS_FOLDER_VARIABLE, status_of_run
from megatron.neox_arguments.launch import LaunchArgs


def num_local_workers(launch: LaunchArgs) -> int:
    """Return `num_gpus`, or the number of NVIDIA devices of this host, or 1. Asks no library: torch takes a second."""
    devices = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    return launch.num_gpus or len(devices) or 1


def local_command(script: str, worker_arguments: Sequence[str], num_workers: int, launch: LaunchArgs) -> list[str]:
    """Return the command that starts `num_workers` processes of `script` on this host."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(num_workers))}).encode()).decode()
    return [
        sys.executable,
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={world}",
        "--node_rank=0",
        f"--master_addr={launch.master_addr or '127.0.0.1'}",
        f"--master_port={launch.master_port or free_port()}",
        "--log_level=critical",  # it would print the whole configuration of each worker
        script,
        *worker_arguments,
    ]


def run_local(command: Sequence[str], num_workers: int) -> int:
    """Run a launcher and return the status of the run, whatever status the launcher itself has.

    SIGINT and SIGTERM ask the workers to save and end: they are passed on to each worker, since the launcher would kill
    them, and the launcher ends when they have.
    """
    with tempfile.TemporaryDirectory(prefix="neox-") as folder:
        environment = {
            **os.environ,
            STATUS_FOLDER_VARIABLE: folder,
            # For DeepSpeed's launcher, which computes nothing but looks for an accelerator; workers set their own.
            "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_workers))),
        }
        # In a session of its own, a Ctrl-C at the terminal reaches deepy alone, which passes it on in its own way.
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        previous = {
            number: signal.signal(number, _passing_on_to_workers_of(process))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
        }
        try:
            launcher_status = process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            _end_session(process)
        return status_of_run(Path(folder), num_workers, launcher_status)


def _passing_on_to_workers_of(process: subprocess.Popen) -> signal.Handlers | None:
    def pass_on(number: int, frame: FrameType | None) -> None:
        for worker in _children(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, number)

    return pass_on  # type: ignore[return-value]


def _children(parent: int) -> list[int]:
    """Process ids of the children of `parent`."""
    try:
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except OSError:
        listed = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False)
        text = listed.stdout
    return [int(child) for child in text.split()]


def _end_session(process: subprocess.Popen) -> None:
    """Leave no orphan behind: what still lives of the launcher's session is ended."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
