"""What is handed on to DeepSpeed as it is, and DeepSpeed's configuration itself."""

from __future__ import annotations

from typing import Any

from megatron.neox_arguments.section import PositiveInt, Section


class DeepspeedArgs(Section):
    """Keys of DeepSpeed's own that keep their meaning."""

    steps_per_print: PositiveInt | None = None
    """Steps between lines of DeepSpeed's own log. Unset: none, our log says it."""
    wall_clock_breakdown: bool = False
    """Have DeepSpeed time forward, backward and step. Waits for the device."""
    dump_state: bool = False
    """Have DeepSpeed print its state at start."""
    flops_profiler: dict[str, Any] | None = None
    """DeepSpeed's FLOPs profiler."""
    deepspeed_extra_args: dict[str, Any] | None = None
    """Further keys of DeepSpeed's configuration. Those that decide precision, ZeRO, batch or optimizer are refused."""
