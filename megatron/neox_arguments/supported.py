"""What can be configured but not run yet, refused in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs


def check_supported(args: NeoXArgs) -> None:
    """Raise ConfigError naming each setting that has its place here but no implementation yet."""
    parallelism, optimizer = args.parallelism, args.optimizer
    problems = [
        f"{key}: {value} is not supported here yet, only {supported}"
        for key, value, supported in (
            ("pipe_parallel_size", parallelism.pipe_parallel_size, 1),
            ("model_parallel_size", parallelism.model_parallel_size, 1),
            ("zero_optimization.stage", parallelism.zero_stage, 0),
        )
        if value != supported
    ]
    dynamic = optimizer.precision == "fp16" and not optimizer.loss_scale
    if parallelism.check_for_nan_in_grad and dynamic:
        problems.append(
            "check_for_nan_in_grad stops at the first overflow, which a dynamic loss scale provokes on purpose: set "
            "loss_scale, or leave the check off"
        )
    if problems:
        raise ConfigError("\n".join(problems))
