"""What is handed on to DeepSpeed as it is."""

from __future__ import annotations

from pydantic import JsonValue

from megatron.errors import ConfigError
from megatron.neox_arguments.section import PositiveInt, Section
from megatron.neox_arguments.yaml_values import same_value

# The engine is a shell: what decides precision, sharding, batch and update is ours, and has an argument of its own.
_OURS = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    | {"fp16", "bf16", "amp", "zero_optimization", "optimizer", "scheduler", "data_types", "communication_data_type"}
    | {"prescale_gradients", "gradient_predivide_factor"}
    | {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}
)


class DeepspeedArgs(Section):
    """Keys of DeepSpeed's own that keep their meaning."""

    steps_per_print: PositiveInt | None = None
    """Steps between lines of DeepSpeed's own log. Unset: none, our log says it."""
    wall_clock_breakdown: bool = False
    """Have DeepSpeed time forward, backward and step. Waits for the device."""
    dump_state: bool = False
    """Have DeepSpeed print its state at start."""
    flops_profiler: dict[str, JsonValue] | None = None
    """DeepSpeed's FLOPs profiler."""
    comms_logger: dict[str, JsonValue] | None = None
    """DeepSpeed's log of its own collectives; the reduction of gradients is not among them."""
    zero_options: dict[str, JsonValue] | None = None
    """Derived: what `zero_optimization` holds besides the stage, with ZeRO 3."""
    deepspeed_extra_args: dict[str, JsonValue] | None = None
    """Further keys of DeepSpeed's configuration. Those that decide precision, ZeRO, batch or optimizer are refused."""


def check_extra_args(deepspeed: DeepspeedArgs) -> DeepspeedArgs:
    """Refuse `deepspeed_extra_args` that set what is ours, or what another key sets otherwise."""
    problems = []
    for key, value in (deepspeed.deepspeed_extra_args or {}).items():
        if key in _OURS:
            problems.append(f"deepspeed_extra_args may not set {key}: set the argument of that name instead")
        elif key in deepspeed.model_fields_set and not same_value(value, getattr(deepspeed, key)):
            problems.append(f"{key} is set, and set differently in deepspeed_extra_args: set it in one place")
    if problems:
        raise ConfigError("\n".join(problems))
    return deepspeed
