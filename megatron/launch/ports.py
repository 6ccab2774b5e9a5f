"""Ports at which the ranks of a run meet."""

from __future__ import annotations

import random
import socket
import zlib
from pathlib import Path

from megatron.errors import ConfigError

_FIRST, _END = 10_000, 30_000


def free_port() -> int:
    """Return a port of this host that nobody listens on now.

    Seconds pass until rank 0 listens there, so the port is drawn at random, that two runs started at once differ, and
    from below the range out of which the kernel serves outgoing connections. Raises ConfigError when none is found.
    """
    for port in random.SystemRandom().sample(range(_FIRST, max(_first_ephemeral(), _FIRST + 1000)), 100):
        if is_free(port):
            return port
    raise ConfigError("no free port found on this host: set master_port")


def is_free(port: int) -> bool:
    """Whether this process could listen on `port` now."""
    with socket.socket() as listener:
        # As torch's store does it: connections of an earlier run that linger are no hindrance.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
        return True


def port_for_job(job: str) -> int:
    """Return a port that all processes of a job arrive at without talking, and other jobs hardly ever."""
    return _FIRST + zlib.crc32(job.encode()) % (_END - _FIRST)


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _END
