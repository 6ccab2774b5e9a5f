"""Settings that are right by themselves and cannot work together."""

from __future__ import annotations

from megatron.neox_arguments.optimizer import OptimizerArgs
from megatron.neox_arguments.parallelism import ParallelismArgs


def problems_of_combinations(parallelism: ParallelismArgs, optimizer: OptimizerArgs) -> list[str]:
    """Return a line for each combination that cannot work, naming all its settings."""
    dynamic_scale = optimizer.precision == "fp16" and not optimizer.loss_scale
    predivides = parallelism.gradient_predivide_factor != 1.0
    factor = f"gradient_predivide_factor: {parallelism.gradient_predivide_factor}"
    combinations = {
        f"overlap_param_gather: true is about parameters that ranks update in shards: it needs zero_stage 1 or 2, not "
        f"{parallelism.zero_stage}": bool(parallelism.overlap_param_gather) and parallelism.zero_stage not in (1, 2),
        "prove_overlap_steps compares overlap with none: it needs overlap_grad_reduce: true": (
            parallelism.prove_overlap_steps > 0 and not parallelism.overlap_grad_reduce and parallelism.zero_stage < 3
        ),
        "check_for_nan_in_grad stops at the first overflow, which a dynamic loss scale provokes on purpose: set "
        "loss_scale, or leave the check off": parallelism.check_for_nan_in_grad and dynamic_scale,
        f"{factor} divides before and after the collective, average_in_collective: true in it: set one of them": (
            predivides and parallelism.average_in_collective
        ),
        f"{factor} divides before and after the collective, prescale_gradients: true before it: set "
        "prescale_gradients: false": predivides and parallelism.prescale_gradients and parallelism.zero_stage < 3,
    }
    return [problem for problem, is_so in combinations.items() if is_so]
