"""`metrics.jsonl`: one JSON object a line, the file other tools read."""

import json
import logging
from pathlib import Path

from megatron.monitor.record import Record, TrainingRecord, ValidationRecord, to_json
from megatron.monitor.sink import Sink

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"
SUPERSEDED_FILE_NAME = "metrics.superseded.jsonl"


class JsonlSink(Sink):
    """Appends to `<log_dir>/metrics.jsonl`, each row flushed as it is written.

    The file always holds one curve. A run that starts at `start_iteration` (0: a fresh run) will write all later rows
    again, so rows after that iteration, all rows before a fresh run, and a last line torn by a kill are moved to
    `metrics.superseded.jsonl` first.
    """

    def __init__(self, log_dir: Path, *, start_iteration: int) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        path = log_dir / FILE_NAME
        if path.exists():
            _supersede(path, start_iteration)
        self._file = path.open("a", encoding="utf-8")

    def training(self, record: TrainingRecord) -> None:
        """Append the row."""
        self._append(record)

    def validation(self, record: ValidationRecord) -> None:
        """Append the row."""
        self._append(record)

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, record: Record) -> None:
        self._file.write(to_json(record) + "\n")
        self._file.flush()


def _supersede(path: Path, start_iteration: int) -> None:
    text = path.read_text(encoding="utf-8", errors="replace")
    kept: list[str] = []
    superseded: list[str] = []
    for line in text.splitlines():
        (kept if _is_before(line, start_iteration) else superseded).append(line)
    if superseded:
        with path.with_name(SUPERSEDED_FILE_NAME).open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in superseded)
        logger.info(
            "%d rows of %s after iteration %d moved to %s", len(superseded), path, start_iteration, SUPERSEDED_FILE_NAME
        )
    if superseded or (text and not text.endswith("\n")):
        rewritten = path.with_name(FILE_NAME + ".rewrite")
        rewritten.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        rewritten.replace(path)


def _is_before(line: str, start_iteration: int) -> bool:
    """Whether a row belongs to the part of the curve that a run starting at `start_iteration` continues."""
    try:
        iteration = json.loads(line)["iteration"]
    except (ValueError, TypeError, KeyError):
        return False
    return isinstance(iteration, int) and start_iteration > 0 and iteration <= start_iteration
