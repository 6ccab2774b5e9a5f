"""Peak memory of this process."""

import resource
import sys
from pathlib import Path

import torch

_PROCESS_STATUS = Path("/proc/self/status")


def peak_memory_bytes(device: torch.device) -> int | None:
    """High-water mark since the process started; None where the device keeps no such count.

    On an accelerator: what torch's allocator held at most on `device`. On CPU: the most memory the process had
    resident.
    """
    if device.type == "cpu":
        return _peak_resident_bytes()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    try:
        return torch.accelerator.max_memory_allocated(device)
    except (RuntimeError, NotImplementedError):  # a device whose allocator keeps no statistics
        return None


def _peak_resident_bytes() -> int:
    # Linux's VmHWM belongs to this program alone; ru_maxrss starts from what the parent had before exec.
    if _PROCESS_STATUS.exists():
        for line in _PROCESS_STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
