from types import SimpleNamespace

import pytest
import torch

from megatron.monitor.device_peak import KNOWN_DEVICES, device_peak_tflops, find_device, peak_tflops
from megatron.neox_arguments.monitor import MonitorArgs

CUDA = torch.device("cuda", 0)


@pytest.fixture
def on_device(monkeypatch):
    def pretend(name, num_processors):
        properties = SimpleNamespace(name=name, multi_processor_count=num_processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return pretend


@pytest.mark.parametrize(
    ("name", "num_processors", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 108, 312.0),
        ("NVIDIA A100 80GB PCIe", 108, 312.0),
        ("NVIDIA H100 80GB HBM3", 132, 989.4),
        ("NVIDIA H100 PCIe", 114, 756.0),
        ("NVIDIA H100 NVL", 132, 835.0),
        ("NVIDIA H200", 132, 989.4),
        ("NVIDIA L40S", 142, 362.0),
        ("AMD Instinct MI250X", 110, 191.5),
        ("AMD Instinct MI300X", 304, 1307.4),
    ],
)
def test_devices_as_torch_names_them(on_device, name, num_processors, bf16):
    on_device(name, num_processors)
    assert device_peak_tflops(CUDA, torch.bfloat16) == bf16


@pytest.mark.parametrize(
    ("name", "num_processors"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14),  # a slice
        ("NVIDIA A100-SXM-64GB", 124),  # a custom part
        ("AMD Instinct MI300X", 38),  # one of eight partitions
        ("NVIDIA GeForce RTX 4090", 128),
        ("NVIDIA A100X", 108),
        ("", 110),
    ],
)
def test_what_is_not_exactly_known_has_no_peak(on_device, name, num_processors):
    on_device(name, num_processors)
    assert device_peak_tflops(CUDA, torch.bfloat16) is None


def test_the_peak_is_that_of_the_dtype(on_device):
    on_device("Tesla V100-SXM2-32GB", 80)
    assert device_peak_tflops(CUDA, torch.float16) == 125.0
    assert device_peak_tflops(CUDA, torch.bfloat16) is None
    assert device_peak_tflops(CUDA, torch.float32) == 15.7
    assert device_peak_tflops(CUDA, torch.float64) is None


def test_float32_on_tf32_cores_is_held_to_their_peak(on_device):
    on_device("NVIDIA H200", 132)
    assert device_peak_tflops(CUDA, torch.float32) == 66.9
    torch.set_float32_matmul_precision("high")
    try:
        assert device_peak_tflops(CUDA, torch.float32) == 494.7
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_cpu_has_no_peak():
    assert device_peak_tflops(torch.device("cpu"), torch.float32) is None


def test_a_peak_the_user_gives_wins(on_device):
    on_device("NVIDIA H200", 132)
    assert peak_tflops(MonitorArgs(peak_theoretical_tflops=500.0), CUDA, torch.bfloat16) == 500.0
    assert peak_tflops(MonitorArgs(), CUDA, torch.bfloat16) == 989.4
    assert peak_tflops(MonitorArgs(peak_theoretical_tflops=0.1), torch.device("cpu"), torch.float32) == 0.1
    assert peak_tflops(MonitorArgs(), torch.device("cpu"), torch.float32) is None


@pytest.mark.parametrize("known", KNOWN_DEVICES, ids=lambda known: " ".join(sorted(known.words)))
def test_no_entry_is_shadowed_by_another(known):
    assert find_device("-".join(known.words), known.num_processors) is known
