"""Weights & Biases."""

import os
from collections.abc import Mapping
from pathlib import Path

from megatron.errors import ConfigError
from megatron.monitor.record import TrainingRecord, ValidationRecord
from megatron.monitor.series import training_series, validation_series
from megatron.monitor.sink import Sink
from megatron.neox_arguments.monitor import MonitorArgs

RUN_ID_FILE_NAME = "wandb_run_id"


class WandbSink(Sink):
    """Logs to one wandb run; `WANDB_MODE=offline` keeps it on disk, under `log_dir`.

    The run's id is kept in `<log_dir>/wandb_run_id`, so that a resumed run (`start_iteration` > 0) continues it.
    wandb's own step is the iteration. It cannot go back: of iterations that a resumed run repeats, wandb keeps the
    first rows (the same ones, when nothing was changed).

    WANDB_BASE_URL and WANDB_PROJECT, where set, win over `wandb_host` and `wandb_project`, which always have a value: a
    site that sends its runs elsewhere is not bypassed by a default.

    Raises ConfigError when wandb cannot start, for instance without an API key.
    """

    def __init__(self, args: MonitorArgs, *, start_iteration: int, config: Mapping[str, object]) -> None:
        import wandb

        id_path = Path(args.log_dir) / RUN_ID_FILE_NAME if args.log_dir else None
        run_id = None
        if start_iteration > 0 and id_path is not None and id_path.exists():
            run_id = id_path.read_text(encoding="utf-8").strip()
        host = os.environ.get("WANDB_BASE_URL") or args.wandb_host
        project = os.environ.get("WANDB_PROJECT") or args.wandb_project
        try:
            self._run = wandb.init(
                project=project,
                entity=args.wandb_team,
                group=args.wandb_group,
                name=args.wandb_run_name,
                dir=args.log_dir,
                id=run_id,
                resume="allow" if run_id else None,
                config=dict(config),
                settings=wandb.Settings(base_url=host),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"use_wandb: wandb cannot start a run in project {project!r} on {host}: {error} "
                "(`wandb login` or WANDB_API_KEY gives it access, WANDB_MODE=offline keeps the run on disk)"
            ) from error
        if id_path:
            id_path.write_text(self._run.id + "\n", encoding="utf-8")

    def training(self, record: TrainingRecord) -> None:
        """Log the interval."""
        self._run.log(training_series(record), step=record.iteration)

    def validation(self, record: ValidationRecord) -> None:
        """Log the evaluation."""
        self._run.log(validation_series(record), step=record.iteration)

    def close(self, *, failed: bool = False) -> None:
        """Send or write what is left; a failed run is marked as such."""
        self._run.finish(exit_code=int(failed))
