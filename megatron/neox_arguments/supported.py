"""What can be configured but not run yet: refused here and nowhere else. To lift a limit, delete its line."""

from __future__ import annotations

from megatron.neox_arguments.optimizer import OptimizerArgs
from megatron.neox_arguments.parallelism import ParallelismArgs


def check_supported(parallelism: ParallelismArgs, optimizer: OptimizerArgs) -> list[str]:
    """Return a line for each setting that has its place here but no implementation yet."""
    problems = [
        f"{key}: {value} is not supported here yet, only {' and '.join(str(each).lower() for each in supported)}"
        for key, value, supported in (
            ("pipe_parallel_size", parallelism.pipe_parallel_size, (1,)),
            ("model_parallel_size", parallelism.model_parallel_size, (1,)),
            ("sequence_parallel", parallelism.sequence_parallel, (False,)),
            ("zero_optimization.stage", parallelism.zero_stage, (0, 3)),
        )
        if value not in supported
    ]
    dynamic = optimizer.precision == "fp16" and not optimizer.loss_scale
    if parallelism.check_for_nan_in_grad and dynamic:
        problems.append(
            "check_for_nan_in_grad stops at the first overflow, which a dynamic loss scale provokes on purpose: set "
            "loss_scale, or leave the check off"
        )
    return problems
