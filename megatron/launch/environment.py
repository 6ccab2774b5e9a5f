"""Who am I: rank, world and address of this process, from whatever started it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.errors import ConfigError
from megatron.launch import slurm
from megatron.launch.ports import free_port, port_for_job

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RankInfo:
    """A process's place in the run, where the ranks meet, and which launcher said so."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    source: str


@dataclass(frozen=True)
class _Launcher:
    """The variables a launcher tells its processes their place with, and those that tell its jobs apart."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: tuple[str, ...]
    job: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[str, str, str]:
        return self.rank, self.world_size, self.local_rank


# In the order of trust: an MPI launcher inside a Slurm job starts its own daemons as Slurm tasks, whose numbers its
# processes inherit.
_LAUNCHERS = (
    _Launcher("torchrun or DeepSpeed", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE",),
    ),
    _Launcher("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
    _Launcher("Slurm", *slurm.PLACE, (slurm.LOCAL_TASKS,), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
_TORCH, _, _MPICH, _SLURM = _LAUNCHERS


def rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Read torchrun's or DeepSpeed's variables, else an MPI launcher's, else Slurm's; without any, we are alone.

    `MASTER_ADDR` and `MASTER_PORT` are taken as set. Where they are not, Slurm's list of hosts and the job's number
    give both, processes of one host meet on loopback, and a process that is alone takes a free port.

    Raises ConfigError when some variables of a launcher are set and others are missing, or one is not a number.
    """
    variables = slurm.with_step_variables(environment)
    for launcher in _LAUNCHERS:
        # Slurm's PMI plugin sets PMI_RANK too, without MPICH's local ranks.
        if (launcher.local_rank if launcher is _MPICH else launcher.rank) in variables:
            return _read(variables, launcher)
    if "WORLD_SIZE" in variables:
        raise _missing(variables, _TORCH)
    return RankInfo(0, 1, 0, 1, LOOPBACK, free_port(), "alone")


def started_by_one_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process and others have a launcher for their parent, which ends with them.

    Ranks that were started by hand share a parent too, a shell, but that one lives on.
    """
    variables = slurm.with_step_variables(environment)
    if _TORCH.rank in variables:
        return "TORCHELASTIC_RUN_ID" in variables
    return any(variables.get(launcher.world_size, "1") != "1" for launcher in _LAUNCHERS[1:])


def _read(environment: Mapping[str, str], launcher: _Launcher) -> RankInfo:
    if not all(name in environment for name in launcher.place):
        raise _missing(environment, launcher)
    rank, world_size, local_rank = (_number(environment, name) for name in launcher.place)
    given = [name for name in launcher.local_world_size if name in environment]
    local_world_size = _number(environment, given[0]) if given else world_size
    if not rank < world_size or not local_rank < local_world_size <= world_size:
        name = given[0] if given else launcher.world_size
        raise ConfigError(
            f"the environment contradicts itself: {launcher.rank} is {rank} of {launcher.world_size} {world_size}, "
            f"{launcher.local_rank} is {local_rank} of {name} {local_world_size}"
        )
    one_host = local_world_size == world_size and bool(given)
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=_master_addr(environment, launcher, world_size, one_host=one_host),
        master_port=_master_port(environment, launcher, world_size),
        source=launcher.name,
    )


def _master_addr(environment: Mapping[str, str], launcher: _Launcher, world_size: int, *, one_host: bool) -> str:
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if world_size == 1 or (one_host and launcher is not _TORCH):
        return LOOPBACK
    if launcher is _SLURM:
        return slurm.first_host(environment)
    raise _no_meeting_point("MASTER_ADDR", launcher, world_size)


def _master_port(environment: Mapping[str, str], launcher: _Launcher, world_size: int) -> int:
    if environment.get("MASTER_PORT"):
        port = _number(environment, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ConfigError(f"MASTER_PORT is {port} in the environment; ports are 1 to 65535")
        return port
    if world_size == 1:
        return free_port()
    job = [environment[name] for name in launcher.job if name in environment]
    if not job:
        raise _no_meeting_point("MASTER_PORT", launcher, world_size)
    return port_for_job("/".join(job))


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is {environment[name]!r} in the environment, which is not a whole number")
    return int(text)


def _missing(environment: Mapping[str, str], launcher: _Launcher) -> ConfigError:
    present = [name for name in launcher.place if name in environment]
    absent = [name for name in launcher.place if name not in environment]
    return ConfigError(
        f"{' and '.join(present)} {_is(present)} set in the environment, but {' and '.join(absent)} {_is(absent)} not: "
        f"{launcher.name} sets all of them. Unset what is left over from elsewhere, or set the rest"
    )


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _no_meeting_point(name: str, launcher: _Launcher, world_size: int) -> ConfigError:
    return ConfigError(
        f"{name} is not set in the environment, and nothing that {launcher.name} sets tells the {world_size} "
        f"processes where to meet: set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there"
    )
