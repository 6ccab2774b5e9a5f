"""Names of the curves in TensorBoard and wandb: the record's field, grouped by a slash."""

from dataclasses import asdict

from megatron.monitor.record import TrainingRecord, ValidationRecord

_GROUP_OF_FIELD = {
    "lm_loss": "train",
    "grad_norm": "train",
    "learning_rate": "train",
    "loss_scale": "train",
    "skipped": "train",
    "step_time_s": "throughput",
    "tokens_per_s": "throughput",
    "tflops_per_device": "throughput",
    "mfu": "throughput",
    "grad_reduce_s": "communication",
    "exposed_grad_reduce_s": "communication",
    "hidden_fraction": "communication",
    "grad_reduce_bytes": "communication",
    "param_gather_s": "communication",
    "exposed_param_gather_s": "communication",
    "param_gather_bytes": "communication",
    "peak_memory_bytes": "memory",
}


def training_series(record: TrainingRecord) -> dict[str, float]:
    """`group/field` to value, for the fields that apply."""
    values = asdict(record)
    return {f"{group}/{field}": values[field] for field, group in _GROUP_OF_FIELD.items() if values[field] is not None}


def validation_series(record: ValidationRecord) -> dict[str, float]:
    """`<split>/lm_loss` and `<split>/ppl`."""
    return {f"{record.split}/lm_loss": record.lm_loss, f"{record.split}/ppl": record.ppl}
