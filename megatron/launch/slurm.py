"""What Slurm tells the tasks of a job step."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron.errors import ConfigError

# Of a step: SLURM_NTASKS is the allocation's, which a step may use a part of.
PLACE = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
# Not Slurm's own: worked out from its list of tasks by host.
LOCAL_TASKS = "tasks on this host, of SLURM_STEP_TASKS_PER_NODE"

# Numbers of the steps that run a batch script and the shell of an interactive allocation: no tasks of a parallel run.
_NO_PARALLEL_STEP = {"4294967290", "4294967291", "interactive", "batch"}


def with_step_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with Slurm's variables only where srun started this process as one task of a step.

    A shell that salloc opened, and a batch script, have a task number too, but a program started there is alone.
    """
    result = {name: value for name, value in environment.items() if name not in PLACE}
    step = environment.get("SLURM_STEP_ID")
    if "SLURM_PROCID" not in environment or step is None or step in _NO_PARALLEL_STEP:
        return result
    result |= {name: environment[name] for name in PLACE if name in environment}
    if PLACE[1] not in environment and "SLURM_NTASKS" in environment:
        result[PLACE[1]] = environment["SLURM_NTASKS"]
    num_tasks = _tasks_by_host(environment)
    node = environment.get("SLURM_NODEID", "0")
    if node.isdigit() and int(node) < len(num_tasks):
        result[LOCAL_TASKS] = str(num_tasks[int(node)])
    return result


def first_host(environment: Mapping[str, str]) -> str:
    """Return the host of task 0. Raises ConfigError when Slurm names none."""
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    # `n[01-03,7],m2`: hosts share a prefix; the bracket holds ranges of numbers with their leading zeros.
    match = re.match(r"(?P<prefix>[^\[,]+)(\[(?P<first>\d+)[^\]]*\](?P<suffix>[^\[,]*))?", hosts)
    if match is None:
        raise ConfigError(f"Slurm's list of hosts is {hosts!r}, which names none: set MASTER_ADDR")
    return match["prefix"] + (match["first"] or "") + (match["suffix"] or "")


def _tasks_by_host(environment: Mapping[str, str]) -> list[int]:
    """Expand `2(x3),1` to 2, 2, 2, 1; empty when absent or unreadable."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    result: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        result += [int(match[1])] * int(match[2] or 1)
    return result
