"""Records the tests of this folder share."""

from dataclasses import replace

from megatron.monitor.record import TrainingRecord, ValidationRecord

TRAINING = TrainingRecord(
    iteration=10,
    lm_loss=0.1 + 0.2,
    grad_norm=1 / 3,
    learning_rate=6e-4,
    loss_scale=65536.0,
    skipped=2,
    step_time_s=1.25,
    tokens_per_s=12345.678,
    tflops_per_device=0.0123456,
    mfu=0.4567,
    grad_reduce_s=0.5,
    exposed_grad_reduce_s=0.0625,
    hidden_fraction=0.875,
    grad_reduce_bytes=82_400_000,
    param_gather_s=0.25,
    exposed_param_gather_s=0.2,
    param_gather_bytes=41_200_000,
    peak_memory_bytes=1 << 30,
)
ONE_RANK_FP32 = replace(
    TRAINING,
    loss_scale=None,
    skipped=0,
    mfu=None,
    grad_reduce_s=None,
    exposed_grad_reduce_s=None,
    hidden_fraction=None,
    grad_reduce_bytes=None,
    param_gather_s=None,
    exposed_param_gather_s=None,
    param_gather_bytes=None,
)
VALIDATION = ValidationRecord.of_loss(10, "valid", 2.3)
