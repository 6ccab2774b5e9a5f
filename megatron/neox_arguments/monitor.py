"""Stand-in until the arguments are merged: the fields of the monitor section that megatron.monitor reads."""

from pydantic import BaseModel, ConfigDict


class MonitorArgs(BaseModel):
    """Fields and defaults as in NeoX."""

    model_config = ConfigDict(frozen=True)
    log_interval: int = 100
    log_dir: str | None = None
    tensorboard_dir: str | None = None
    use_wandb: bool | None = None
    wandb_group: str | None = None
    wandb_run_name: str | None = None
    wandb_team: str | None = None
    wandb_project: str = "neox"
    wandb_host: str = "https://api.wandb.ai"
    peak_theoretical_tflops: float | None = None
