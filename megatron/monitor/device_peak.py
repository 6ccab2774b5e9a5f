"""Dense matrix peaks of known accelerators, from their makers' data sheets (half of a figure "with sparsity")."""

import re
from dataclasses import dataclass

import torch

from megatron.neox_arguments.monitor import MonitorArgs


@dataclass(frozen=True)
class DevicePeak:
    """Peaks in TFLOPS of what torch shows as one device; None where the data sheet has no figure we trust."""

    words: frozenset[str]
    """Words the device's name must have."""
    num_processors: int
    """Multiprocessors (NVIDIA) or compute units (AMD). A partition of a device or a custom part has another number."""
    fp16: float
    bf16: float | None
    tf32: float | None
    fp32: float | None


def _peak(name: str, num_processors: int, half: float, tf32: float | None, fp32: float | None) -> DevicePeak:
    return DevicePeak(frozenset(name.split()), num_processors, fp16=half, bf16=half, tf32=tf32, fp32=fp32)


# A name with more words comes before the name it extends. AMD's fp32 is its matrix cores' (what rocBLAS uses); torch
# shows each half of an MI250 or MI250X as a device.
KNOWN_DEVICES = (
    DevicePeak(frozenset({"V100", "SXM2"}), 80, fp16=125.0, bf16=None, tf32=None, fp32=15.7),
    DevicePeak(frozenset({"V100", "PCIE"}), 80, fp16=112.0, bf16=None, tf32=None, fp32=14.0),
    DevicePeak(frozenset({"V100S", "PCIE"}), 80, fp16=130.0, bf16=None, tf32=None, fp32=16.4),
    DevicePeak(frozenset({"T4"}), 40, fp16=65.0, bf16=None, tf32=None, fp32=8.1),
    _peak("A100", 108, 312.0, 156.0, 19.5),
    _peak("A800", 108, 312.0, 156.0, 19.5),
    _peak("A30", 56, 165.0, 82.0, 10.3),
    _peak("A40", 84, 149.7, 74.8, 37.4),
    _peak("A10", 72, 125.0, 62.5, 31.2),
    _peak("L4", 58, 121.0, 60.0, 30.3),
    _peak("L40", 142, 181.0, 90.5, 90.5),
    _peak("L40S", 142, 362.0, 183.0, 91.6),
    _peak("H100 NVL", 132, 835.0, 417.0, 60.0),
    _peak("H100 PCIe", 114, 756.0, 378.0, 51.0),
    _peak("H100", 132, 989.4, 494.7, 66.9),
    _peak("H800", 132, 989.4, 494.7, 66.9),
    _peak("H20", 78, 148.0, 74.0, 44.0),
    _peak("H200 NVL", 132, 835.0, 417.0, 60.0),
    _peak("H200", 132, 989.4, 494.7, 66.9),
    _peak("GH200", 132, 989.4, 494.7, 66.9),
    _peak("B200", 148, 2250.0, None, None),
    DevicePeak(frozenset({"MI100"}), 120, fp16=184.6, bf16=92.3, tf32=None, fp32=46.1),
    _peak("MI210", 104, 181.0, None, 45.3),
    _peak("MI250", 104, 181.0, None, 45.3),
    _peak("MI250X", 110, 191.5, None, 47.9),
    _peak("MI300A", 228, 980.6, 490.3, 122.6),
    _peak("MI300X", 304, 1307.4, 653.7, 163.4),
    _peak("MI325X", 304, 1307.4, 653.7, 163.4),
)


def find_device(name: str, num_processors: int) -> DevicePeak | None:
    """The entry of a device by the name and the number of processors torch reports; None when there is none."""
    words = set(re.split(r"[\s\-]+", name))
    for known in KNOWN_DEVICES:
        if known.words <= words:
            return known if known.num_processors == num_processors else None
    return None


def peak_tflops(args: MonitorArgs, device: torch.device, dtype: torch.dtype) -> float | None:
    """What MFU is measured against: `peak_theoretical_tflops` if given, else the known peak of `device`, else None."""
    return args.peak_theoretical_tflops or device_peak_tflops(device, dtype)


def device_peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense peak of `device` for products of `dtype` (tf32 for float32 where torch is set to it); None if not known."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    known = find_device(properties.name, properties.multi_processor_count)
    if known is None:
        return None
    uses_tf32 = torch.get_float32_matmul_precision() != "highest"
    peaks = {
        torch.float16: known.fp16,
        torch.bfloat16: known.bf16,
        torch.float32: known.tf32 if uses_tf32 else known.fp32,
    }
    return peaks.get(dtype)
