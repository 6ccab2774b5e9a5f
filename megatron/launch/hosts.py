"""Which hosts and slots a run uses, and DeepSpeed's runner that reaches other hosts."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.launch.environment import LOOPBACK
from megatron.launch.exit_record import read_exit_record
from megatron.launch.exit_status import FAULT, shell_status
from megatron.launch.local import num_local_workers, worker_environment
from megatron.launch.supervise import supervise
from megatron.neox_arguments.launch import LaunchArgs

_HOST_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)\s*")
_NODE = re.compile(r"(?P<host>[^:@\s]+)(:(?P<slots>\d+(,\d+)*))?")

# The slots of each host, in the order in which ranks are counted.
Slots = Mapping[str, tuple[int, ...]]


def chosen_slots(launch: LaunchArgs) -> Slots:
    """Return the hosts of a run and their slots: those of the hostfile less what the arguments leave out.

    Raises ConfigError for a hostfile that cannot be used, or arguments that do not fit it or each other.
    """
    if not launch.hostfile:
        _check_one_host(launch)
        return {"localhost": tuple(range(num_local_workers(launch)))}
    slots: Slots = {host: tuple(range(count)) for host, count in read_hostfile(launch.hostfile).items()}
    restricted = launch.num_nodes > 0 or launch.num_gpus is not None
    if (launch.include or launch.exclude) and (restricted or (launch.include and launch.exclude)):
        raise ConfigError("of include, exclude, and num_nodes with num_gpus, only one can be set")
    if launcher_name(launch) in ("openmpi", "mvapich") and (launch.include or launch.exclude or restricted):
        raise ConfigError(
            f"launcher {launcher_name(launch)} uses the whole hostfile: it takes no include, exclude, "
            "num_nodes or num_gpus"
        )
    if launch.include:
        slots = _included(slots, launch.include)
    elif launch.exclude:
        slots = _excluded(slots, launch.exclude)
    return _limited(slots, launch)


def planned_world_size(launch: LaunchArgs) -> int:
    """Return the number of processes of the run. Raises ConfigError as `chosen_slots` does."""
    return sum(len(slots) for slots in chosen_slots(launch).values())


def is_local(slots: Slots, launch: LaunchArgs) -> bool:
    """Whether the run needs no launcher that reaches other hosts. A single host is not always this one."""
    here = {"localhost", LOOPBACK, socket.gethostname(), socket.getfqdn()}
    elsewhere = launch.force_multi or launcher_name(launch) != "pdsh"
    return len(slots) == 1 and not elsewhere and set(slots) <= here


def launcher_name(launch: LaunchArgs) -> str:
    """Return the launcher that DeepSpeed is to use; `deepspeed_slurm` and `deepspeed_mpi` name one too."""
    if launch.deepspeed_slurm:
        return "slurm"
    return "openmpi" if launch.deepspeed_mpi else launch.launcher


def read_hostfile(path: str) -> dict[str, int]:
    """Return the slots of each host, in the order of the file. Raises ConfigError naming the line that is off."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hostfile {path} cannot be read: {error}") from error
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        match = _HOST_LINE.fullmatch(content)
        if match is None or match["host"] in slots or int(match["slots"]) == 0:
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
        ("--launcher", launcher_name(launch)),
        ("--launcher_args", _launcher_arguments(launch)),
        ("--log_level", "warning"),  # it would print the configuration
    ]
    given = [f"{name}={value}" for name, value in options if value]
    # Without it, the runner starts a run on a single host here, whatever that host's name.
    switches = ["--force_multi", *(["--no_ssh_check"] if launch.no_ssh_check else [])]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *given, *switches, script, *worker_arguments]


def run_on_hosts(command: Sequence[str], slots: Slots, log_dir: str | None) -> int:
    """Run DeepSpeed's runner and return the status of the run.

    The runner returns 0 when its launcher is ended by a signal; what rank 0 left in `log_dir` knows better.
    """
    environment = worker_environment(max(len(of_host) for of_host in slots.values()))
    ended = supervise(command, environment, lambda runner: [runner])
    status = 128 + ended.received if ended.received else shell_status(ended.status)
    record = None if log_dir is None else read_exit_record(log_dir)
    if record is not None and (record.code != 0 or ended.status == 0):
        return record.code
    return status or (0 if log_dir is None else FAULT)


def _check_one_host(launch: LaunchArgs) -> None:
    for key in ("include", "exclude", "deepspeed_slurm", "deepspeed_mpi", "force_multi"):
        if getattr(launch, key):
            raise ConfigError(f"{key} needs a hostfile. Started by srun or mpirun itself, train.py needs none")
    if launch.num_nodes > 1:
        raise ConfigError(f"num_nodes is {launch.num_nodes}, but there is no hostfile to take hosts from")


def _included(slots: Slots, include: str) -> Slots:
    wanted = _nodes(include, "include", slots)
    return {host: wanted[host] or of_host for host, of_host in slots.items() if host in wanted}


def _excluded(slots: Slots, exclude: str) -> Slots:
    unwanted = _nodes(exclude, "exclude", slots)
    left = {
        host: tuple(slot for slot in of_host if host not in unwanted or (unwanted[host] and slot not in unwanted[host]))
        for host, of_host in slots.items()
    }
    left = {host: of_host for host, of_host in left.items() if of_host}
    if not left:
        raise ConfigError(f"exclude '{exclude}' leaves no slot")
    return left


def _nodes(text: str, key: str, slots: Slots) -> dict[str, tuple[int, ...]]:
    """Read `host1@host2:0,2`; a host without slots means all of them and is given as ()."""
    nodes: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        match = _NODE.fullmatch(part)
        if match is None:
            raise ConfigError(f"{key} '{text}': write host@host:slot,slot")
        host = match["host"]
        numbers = {int(number) for number in match["slots"].split(",")} if match["slots"] else set()
        if host not in slots:
            raise ConfigError(f"{key} '{text}': the hostfile has no {host}; it has {', '.join(slots)}")
        if not numbers <= set(slots[host]):
            raise ConfigError(f"{key} '{text}': {host} has slots 0 to {len(slots[host]) - 1}")
        nodes[host] = tuple(sorted(numbers | set(nodes.get(host, ()))))
    return nodes


def _limited(slots: Slots, launch: LaunchArgs) -> Slots:
    if launch.num_nodes > len(slots):
        raise ConfigError(f"num_nodes is {launch.num_nodes}, but the hostfile has {len(slots)} hosts")
    kept = dict(list(slots.items())[: launch.num_nodes if launch.num_nodes > 0 else None])
    for host, of_host in kept.items():
        if launch.num_gpus is not None and launch.num_gpus > len(of_host):
            raise ConfigError(f"num_gpus is {launch.num_gpus}, but {host} has {len(of_host)} slots")
    return {host: of_host[: launch.num_gpus] for host, of_host in kept.items()}


def _launcher_arguments(launch: LaunchArgs) -> str:
    if launcher_name(launch) != "slurm":
        return ""
    given = {"comment": launch.comment, "account": launch.account}
    return " ".join(shlex.quote(f"--{name}={value}") for name, value in given.items() if value)
