"""ZeRO 3 is DeepSpeed's own: what of `zero_optimization` reaches it, what cannot go with it, its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments.deepspeed import DeepspeedArgs
from megatron.neox_arguments.optimizer import OptimizerArgs
from megatron.neox_arguments.parallelism import ParallelismArgs
from megatron.neox_arguments.yaml_values import Kind, shown

# Keys of `zero_optimization` that decide something with stage 3, as DeepSpeed names them.
PASSED_ON: dict[str, Kind] = {
    "overlap_comm": "bool",
    "reduce_scatter": "bool",
    "reduce_bucket_size": "int",
    "contiguous_gradients": "bool",
    "sub_group_size": "int",
    "offload_optimizer": "dict",
    "offload_param": "dict",
    "stage3_prefetch_bucket_size": "int",
    "stage3_param_persistence_threshold": "int",
    "stage3_model_persistence_threshold": "int",
    "stage3_max_live_parameters": "int",
    "stage3_max_reuse_distance": "int",
    "stage3_module_granularity_threshold": "int",
    "stage3_use_all_reduce_for_fetch_params": "bool",
    "stage3_allgather_sequential": "bool",
    "memory_efficient_linear": "bool",
    "log_trace_cache_warnings": "bool",
    "enable_sanity_checks": "bool",
}
# Those that decide nothing with stage 3: of stages 1 and 2, or about checkpoints, which are ours.
WITHOUT_EFFECT: dict[str, Kind] = {
    "allgather_partitions": "bool",
    "allgather_bucket_size": "int",
    "round_robin_gradients": "bool",
    "ignore_unused_parameters": "bool",
    "load_from_fp32_weights": "bool",
    "elastic_checkpoint": "bool",
    "stage3_gather_16bit_weights_on_model_save": "bool",
    "stage3_gather_fp16_weights_on_model_save": "bool",
}
_DTYPES = {"fp32": "fp32", "bfloat16": "bf16", "fp16": "fp16"}
_OFFLOAD_KEYS = {"device", "pin_memory"}


def problems_of_options(options: Mapping[str, Any]) -> list[str]:
    """Return a line for each option of `zero_optimization` whose value cannot be passed on."""
    problems = [
        f"zero_optimization.{key}: {shown(value)} should be a whole number of at least {least}"
        for key, value in options.items()
        if PASSED_ON.get(key) == "int" and value < (least := 1 if key == "reduce_bucket_size" else 0)
    ]
    for key in ("offload_optimizer", "offload_param"):
        offload = options.get(key) or {}
        if offload.get("device", "none") not in ("none", "cpu"):
            problems.append(
                f"zero_optimization.{key}.device: {shown(offload['device'])} is not supported here yet, only cpu"
            )
        problems.extend(
            f"zero_optimization.{key}.{name} is not supported here yet, only device and pin_memory"
            for name in sorted(offload.keys() - _OFFLOAD_KEYS)
        )
        if not isinstance(offload.get("pin_memory", True), bool):
            problems.append(
                f"zero_optimization.{key}.pin_memory: {shown(offload['pin_memory'])} should be true or false"
            )
    return problems


def problems_of_zero3(parallelism: ParallelismArgs, deepspeed: DeepspeedArgs) -> list[str]:
    """Return a line for each argument that ZeRO 3 cannot honour; none with another stage."""
    if parallelism.zero_stage != 3:
        return []
    reasons = {
        f"pipe_parallel_size: {parallelism.pipe_parallel_size}": (
            parallelism.pipe_parallel_size > 1,
            "parameters sharded over data ranks cannot be the stages of a pipeline",
        ),
        f"model_parallel_size: {parallelism.model_parallel_size}": (
            parallelism.model_parallel_size > 1,
            "layers split over tensor ranks and sharded over data ranks at once are not supported here",
        ),
        "check_for_nan_in_grad: true": (
            parallelism.check_for_nan_in_grad,
            "DeepSpeed reduces the gradients, and looks at them only afterwards",
        ),
        f"prove_overlap_steps: {parallelism.prove_overlap_steps}": (
            parallelism.prove_overlap_steps > 0,
            "DeepSpeed reduces the gradients, one way only",
        ),
        "average_in_collective: true": (
            parallelism.average_in_collective,
            "DeepSpeed divides the gradients itself before it sends them",
        ),
        f"gradient_predivide_factor: {parallelism.gradient_predivide_factor}": (
            parallelism.gradient_predivide_factor != 1.0,
            "DeepSpeed divides the gradients by the number of data ranks before it sends them",
        ),
    }
    problems = [f"{what} does not go with ZeRO 3: {why}" for what, (is_so, why) in reasons.items() if is_so]
    asked = (deepspeed.zero_options or {}).get("overlap_comm")
    flag = parallelism.overlap_grad_reduce
    if asked is not None and "overlap_grad_reduce" in parallelism.model_fields_set and asked != flag:
        problems.append(
            f"zero_optimization.overlap_comm is {str(asked).lower()} and overlap_grad_reduce {str(flag).lower()}: with "
            "ZeRO 3 they are the same, set one of them"
        )
    return problems


def notices_of_zero3(parallelism: ParallelismArgs, deepspeed: DeepspeedArgs) -> list[str]:
    """Return the lines that say who reduces gradients with ZeRO 3, and what has no effect; none with another stage."""
    if parallelism.zero_stage != 3:
        return []
    notices = [
        "ZeRO 3: gradients are reduced by DeepSpeed itself; overlap_grad_reduce sets its overlap_comm to "
        f"{str(_overlaps(parallelism, deepspeed)).lower()}"
    ]
    if parallelism.ddp_bucket_size is not None:
        notices.append(
            "ddp_bucket_size has no effect with ZeRO 3: DeepSpeed's buckets are sized by "
            "zero_optimization.reduce_bucket_size"
        )
    if not parallelism.prescale_gradients:
        notices.append("prescale_gradients: false has no effect with ZeRO 3: DeepSpeed divides before it sends")
    return notices


def zero3_config(parallelism: ParallelismArgs, optimizer: OptimizerArgs, deepspeed: DeepspeedArgs) -> dict[str, Any]:
    """Return the part of DeepSpeed's configuration that makes it train with ZeRO 3."""
    config: dict[str, Any] = {
        "zero_optimization": {
            **(deepspeed.zero_options or {}),
            "stage": 3,
            "overlap_comm": _overlaps(parallelism, deepspeed),
        },
        "gradient_clipping": optimizer.gradient_clipping,
        # DeepSpeed would accumulate and send in the training precision.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": _DTYPES[parallelism.grad_wire_dtype],
        # The optimizer is torch's, not one of DeepSpeed's, which are compiled at start.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if optimizer.precision == "bfloat16":
        config["bf16"] = {"enabled": True}
    if optimizer.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 1.0}  # not its own scaler: the engine sets the scale
    return config


def _overlaps(parallelism: ParallelismArgs, deepspeed: DeepspeedArgs) -> bool:
    """Whether DeepSpeed is asked to overlap: by the flag, or by DeepSpeed's own name for it."""
    return parallelism.overlap_grad_reduce or bool((deepspeed.zero_options or {}).get("overlap_comm"))
