"""TensorBoard event files."""

from pathlib import Path

from megatron.monitor.record import TrainingRecord, ValidationRecord
from megatron.monitor.series import training_series, validation_series
from megatron.monitor.sink import Sink


class TensorBoardSink(Sink):
    """Writes scalars (float32, TensorBoard's own precision) under `directory`.

    A resumed run asks TensorBoard to drop what an earlier one wrote after `start_iteration`.
    """

    def __init__(self, directory: Path, *, start_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=start_iteration + 1)

    def training(self, record: TrainingRecord) -> None:
        """Write the interval's scalars."""
        self._write(training_series(record), record.iteration)

    def validation(self, record: ValidationRecord) -> None:
        """Write the evaluation's scalars."""
        self._write(validation_series(record), record.iteration)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _write(self, series: dict[str, float], iteration: int) -> None:
        for name, value in series.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()
