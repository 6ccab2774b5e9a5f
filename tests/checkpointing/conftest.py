"""No test can see what fsync does to a disk; hundreds of them cost more time than all the rest."""

import os

import pytest


@pytest.fixture(autouse=True)
def synced(monkeypatch):
    """Paths that were fsynced so far, in order; nothing is waited for."""
    paths = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: paths.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    return paths
