"""The configuration DeepSpeed is given: a shell for fp32 and ZeRO 0, around our own reducer and optimizer.

With ZeRO 3 it is no shell: DeepSpeed trains.
"""

from __future__ import annotations

from typing import Any

from megatron.neox_arguments.arguments import NeoXArgs
from megatron.neox_arguments.zero3 import zero3_config

# steps_per_print cannot be switched off in DeepSpeed; this many steps are never made.
_NEVER = 2**62

# DeepSpeed's own throughput waits for the device twice in each micro-batch, and ours is in the metrics.
_NO_TIMERS = {"throughput": {"enabled": False}}


def deepspeed_config(args: NeoXArgs) -> dict[str, Any]:
    """Return DeepSpeed's configuration: the batch, and the user's own keys for DeepSpeed."""
    config = {
        "train_micro_batch_size_per_gpu": args.training.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": args.training.gradient_accumulation_steps,
        "steps_per_print": args.deepspeed.steps_per_print or _NEVER,
        "timers": _NO_TIMERS,
        "wall_clock_breakdown": args.deepspeed.wall_clock_breakdown,
        "dump_state": args.deepspeed.dump_state,
        "flops_profiler": args.deepspeed.flops_profiler,
        "comms_logger": args.deepspeed.comms_logger,
        **(args.deepspeed.deepspeed_extra_args or {}),
    }
    if args.parallelism.zero_stage == 3:
        config |= zero3_config(args.parallelism, args.optimizer, args.deepspeed)
    return {key: value for key, value in config.items() if value is not None}
