"""What can be configured but not run yet: refused here and nowhere else. To lift a limit, delete its line."""

from __future__ import annotations

from megatron.neox_arguments.optimizer import OptimizerArgs
from megatron.neox_arguments.parallelism import ParallelismArgs


def check_supported(parallelism: ParallelismArgs, optimizer: OptimizerArgs) -> list[str]:
    """Return a line for each setting that has its place here but no implementation yet."""
    problems = []
    dynamic = optimizer.precision == "fp16" and not optimizer.loss_scale
    if parallelism.check_for_nan_in_grad and dynamic:
        problems.append(
            "check_for_nan_in_grad stops at the first overflow, which a dynamic loss scale provokes on purpose: set "
            "loss_scale, or leave the check off"
        )
    return problems
