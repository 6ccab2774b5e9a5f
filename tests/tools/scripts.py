"""Running a tool as a user does: a script, from the root of the repository."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"tools/datasets/{name}", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120)


def assert_refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    """The run ended with status 2 and one line on stderr that says all of this."""
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for part in said:
        assert part in done.stderr
