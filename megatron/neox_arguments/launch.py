"""Where worker processes run and how they are started."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megatron.neox_arguments.section import PositiveInt, Section, whole_number


def _not_zero(num_nodes: int) -> int:
    if num_nodes == 0:
        raise ValueError("should be at least 1, or -1 for all hosts")
    return num_nodes


class LaunchArgs(Section):
    """Hosts and launcher."""

    num_gpus: PositiveInt | None = None
    """Worker processes a host. Unset: one for each accelerator, or one."""
    num_nodes: Annotated[int, BeforeValidator(whole_number), Field(ge=-1, le=2**31), AfterValidator(_not_zero)] = -1
    """Use this many hosts of the hostfile; -1 uses all."""
    hostfile: str | None = None
    """File with a line `host slots=N` for each host. Unset: this machine only."""
    include: str | None = None
    """Hosts and slots to use: `host1@host2:0,2`."""
    exclude: str | None = None
    """Hosts and slots not to use."""
    master_addr: str | None = None
    """Address of rank 0's host. Unset: found."""
    master_port: Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=65535)] | None = None
    """Port of the rendezvous on rank 0's host, 1 to 65535. Unset: a free one on one host, 29500 on several."""
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm"] = "pdsh"
    """How processes are started on other hosts."""
    deepspeed_slurm: bool = False
    """Start through srun from within an allocation."""
    deepspeed_mpi: bool = False
    """Start through mpirun."""
    force_multi: bool = False
    """Treat a single host as several: start it through `launcher` too."""
    no_ssh_check: bool = False
    """Do not try ssh before starting."""
    comment: str | None = None
    """Passed to srun as --comment."""
    account: str | None = None
    """Passed to srun as --account."""
