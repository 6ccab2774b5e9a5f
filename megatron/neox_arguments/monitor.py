"""What is recorded, and where it goes."""

from __future__ import annotations

from megatron.neox_arguments.section import PositiveFloat, PositiveInt, Section


class MonitorArgs(Section):
    """Logging."""

    log_interval: PositiveInt = 100
    """Steps between rows of metrics."""
    log_dir: str | None = None
    """Directory for metrics.jsonl, exit.json and the logs of each rank."""
    tensorboard_dir: str | None = None
    """Directory for TensorBoard."""
    use_wandb: bool | None = None
    """Send metrics to Weights & Biases. The key comes from the environment (WANDB_API_KEY), never from a file."""
    wandb_group: str | None = None
    """Group of the run."""
    wandb_run_name: str | None = None
    """Name of the run."""
    wandb_team: str | None = None
    """Team that owns the project."""
    wandb_project: str = "neox"
    """Project of the run."""
    wandb_host: str = "https://api.wandb.ai"
    """Server."""
    peak_theoretical_tflops: PositiveFloat | None = None
    """Peak of one device in TFLOPS, for MFU. Unset: a table of known devices; unknown ones have no MFU."""
