"""No test can see what fsync does to a disk; hundreds of them cost more time than all the rest."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def synced(monkeypatch):
    """Paths that were fsynced so far, in order; nothing is waited for."""
    paths = []

    def record(descriptor):
        paths.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    monkeypatch.setattr(os, "fsync", record)
    return paths
