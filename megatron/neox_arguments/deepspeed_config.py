"""The configuration DeepSpeed is given: a shell for fp32 and ZeRO 0, around our own reducer and optimizer."""

from __future__ import annotations

from typing import Any

from megatron.errors import ConfigError
from megatron.neox_arguments.arguments import NeoXArgs

# steps_per_print cannot be switched off in DeepSpeed; this many steps are never made.
_NEVER = 2**62

_OURS = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    | {"fp16", "bf16", "amp", "zero_optimization", "optimizer", "scheduler", "data_types", "communication_data_type"}
    | {"prescale_gradients", "gradient_predivide_factor"}
)


def deepspeed_config(args: NeoXArgs) -> dict[str, Any]:
    """Return DeepSpeed's configuration. Raises ConfigError where `deepspeed_extra_args` sets what is ours."""
    extra = args.deepspeed.deepspeed_extra_args or {}
    taken = sorted(_OURS & extra.keys())
    if taken:
        raise ConfigError(f"deepspeed_extra_args may not set {', '.join(taken)}: set the argument of that name instead")
    config = {
        "train_micro_batch_size_per_gpu": args.training.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": args.training.gradient_accumulation_steps,
        "steps_per_print": args.deepspeed.steps_per_print or _NEVER,
        "wall_clock_breakdown": args.deepspeed.wall_clock_breakdown,
        "dump_state": args.deepspeed.dump_state,
        "flops_profiler": args.deepspeed.flops_profiler,
        **extra,
    }
    return {key: value for key, value in config.items() if value is not None}
