"""Runs a script with its streams on pipes or on a pseudo-terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass


@dataclass(frozen=True)
class Streams:
    stdout: str
    stderr: str


def run_piped(script: str, *argv: str) -> Streams:
    result = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, check=True)
    return Streams(result.stdout, result.stderr)


def run_on_terminal(script: str, *argv: str, is_stdout_too: bool, environ: dict[str, str]) -> Streams:
    """stderr is a terminal 200 columns wide; stdout is the same terminal (and then empty here), or a pipe."""
    terminal, child_end = pty.openpty()
    fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", script, *argv],
        stdin=subprocess.DEVNULL,
        stdout=child_end if is_stdout_too else subprocess.PIPE,
        stderr=child_end,
        env={**{key: value for key, value in os.environ.items() if key not in ("CI", "TERM")}, **environ},
    )
    os.close(child_end)
    written = b""
    while chunk := _read_or_end(terminal):
        written += chunk
    os.close(terminal)
    stdout, _ = process.communicate()
    assert process.returncode == 0, written.decode()
    return Streams((stdout or b"").decode(), written.decode())


def _read_or_end(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other end is closed
        return b""
