"""An equal share of the cores for each emulated host, when there are more hosts than cores.

Two ranks that only share a core would each run at full speed while the other waits for the network; with a quota each
computes at the same rate all the time, as on a host of its own. Uses the kernel's CPU controller (cgroup 1 or 2).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.errors import ConfigError

_PERIOD_US = 10_000
# What the kernel and the switch need is taken off, so that no host is short of its quota.
_USABLE = 0.95


@contextmanager
def equal_shares(num_hosts: int, root: Path = Path("/sys/fs/cgroup")) -> Iterator[list[list[str]]]:
    """Give for each host what a command must begin with to run on its share; nothing while each has a core to itself.

    Raises ConfigError where this process may not set quotas.
    """
    num_cores = os.cpu_count() or 1
    if num_hosts <= num_cores:
        yield [[] for _ in range(num_hosts)]
        return
    quota_us = int(_USABLE * num_cores / num_hosts * _PERIOD_US)
    of_version_1 = (root / "cpu").is_dir()
    groups = [(root / "cpu" if of_version_1 else root) / f"neox{os.getpid()}h{index}" for index in range(num_hosts)]
    try:
        try:
            for group in groups:
                group.mkdir()
                if of_version_1:
                    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                    (group / "cpu.cfs_quota_us").write_text(str(quota_us))
                else:
                    (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        except OSError as error:
            raise ConfigError(
                f"{num_hosts} hosts on {num_cores} cores need CPU quotas, which could not be set: {error}"
            ) from error
        yield [["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"] for group in groups]
    finally:
        for group in groups:
            if group.is_dir():
                group.rmdir()
