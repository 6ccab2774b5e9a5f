"""Who am I: rank, world and address of this process, from whatever started it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.errors import ConfigError


@dataclass(frozen=True)
class RankInfo:
    """A process's place in the run, and where the ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


def rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Read torchrun's or DeepSpeed's variables, else Slurm's, else Open MPI's; without any, this process is alone.

    Raises ConfigError when some variables of a launcher are set and others are missing, or one is not a number.
    """
    # RANK and WORLD_SIZE are set by launchers only; MASTER_ADDR and LOCAL_RANK also by users for one of the others.
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _read(environment, _TORCH[:3], environment.get("LOCAL_WORLD_SIZE"))
    # A shell inside an allocation has SLURM_NTASKS too, but only a step started by srun has a process number.
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _read(environment, _SLURM, environment.get("SLURM_NTASKS_PER_NODE"))
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _read(environment, _OPEN_MPI, environment.get("OMPI_COMM_WORLD_LOCAL_SIZE"))
    return RankInfo(0, 1, 0, 1, "127.0.0.1", free_port())


def free_port() -> int:
    """Return a port of this host that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _read(environment: Mapping[str, str], names: tuple[str, ...], local_world_size: str | None) -> RankInfo:
    rank, world_size, local_rank = (_number(environment, name) for name in names)
    if not 0 <= rank < world_size or local_rank < 0:
        raise ConfigError(f"{names[0]} {rank} and {names[2]} {local_rank} do not fit {names[1]} {world_size}")
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=int(local_world_size) if local_world_size and local_world_size.isdigit() else world_size,
        master_addr=_master_addr(environment, world_size),
        master_port=_number(environment, "MASTER_PORT") if world_size > 1 else free_port(),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        present = ", ".join(other for other in (*_TORCH, *_SLURM, *_OPEN_MPI) if other in environment)
        raise ConfigError(
            f"{name} is not set in the environment, although {present} are: the launcher sets all or none"
        )
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r} in the environment, which is not a whole number")
    return int(text)


def _master_addr(environment: Mapping[str, str], world_size: int) -> str:
    address = environment.get("MASTER_ADDR")
    if address is None and world_size > 1:
        raise ConfigError(f"MASTER_ADDR is not set in the environment, although there are {world_size} processes")
    return address or "127.0.0.1"
