import resource
import subprocess
import sys

import torch

from megatron.monitor import memory
from megatron.monitor.memory import peak_memory_bytes

CPU = torch.device("cpu")


def test_the_cpu_peak_counts_memory_that_was_given_back():
    num_bytes = 1 << 28
    script = f"""
import sys, torch
from megatron.monitor.memory import peak_memory_bytes
before = peak_memory_bytes(torch.device("cpu"))
block = torch.ones({num_bytes}, dtype=torch.uint8)
del block
print(before, peak_memory_bytes(torch.device("cpu")))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, after = map(int, result.stdout.split())
    assert 0.9 * num_bytes < after - before < 1.5 * num_bytes


def test_it_agrees_with_the_kernels_resource_count(monkeypatch, tmp_path):
    peak_bytes = peak_memory_bytes(CPU)
    slack_bytes = 1 << 20  # the kernel batches its counts
    assert peak_bytes <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + slack_bytes
    monkeypatch.setattr(memory, "_PROCESS_STATUS", tmp_path / "absent")
    assert peak_memory_bytes(CPU) >= peak_bytes - slack_bytes


def test_an_accelerators_own_statistics_are_used(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 1000 + device.index)
    assert peak_memory_bytes(torch.device("cuda", 3)) == 1003
    assert peak_memory_bytes(torch.device("meta")) is None
