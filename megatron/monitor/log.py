"""The process's log: one format, rank-aware, under a progress bar and in a file."""

import logging
import sys
import time
from pathlib import Path

_HANDLER_PREFIX = "megatron.monitor."
_OWN_LOGGERS = "megatron"


def setup_logging(rank: int, *, log_dir: Path | None = None) -> None:
    """Set logging up for this process; call it after DeepSpeed was imported, again to change the settings.

    Rank 0 shows our own messages from INFO (stdout) and everybody's from WARNING (stderr); other ranks show warnings
    and errors, with their rank. Python warnings appear on rank 0 only: all ranks run the same code. With `log_dir`, the
    same goes to `<log_dir>/log/rank_<rank>.log`, which exists once there is something to say.
    """
    is_rank_0 = rank == 0
    formatter = _Formatter(rank)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if (handler.name or "").startswith(_HANDLER_PREFIX)]:
        root.removeHandler(handler)
        handler.close()
    for handler in _handlers(rank, log_dir):
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(_OWN_LOGGERS).setLevel(logging.INFO if is_rank_0 else logging.WARNING)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.WARNING if is_rank_0 else logging.ERROR)
    _adopt(logging.getLogger("DeepSpeed"))


def _handlers(rank: int, log_dir: Path | None) -> list[logging.Handler]:
    informative = _TerminalHandler("stdout")
    informative.addFilter(lambda record: record.levelno < logging.WARNING)
    alarming = _TerminalHandler("stderr")
    alarming.setLevel(logging.WARNING)
    handlers: list[logging.Handler] = [informative, alarming]
    if log_dir is not None:
        directory = log_dir / "log"
        directory.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(directory / f"rank_{rank}.log", encoding="utf-8", delay=True))
        handlers[-1].name = f"{_HANDLER_PREFIX}file"
    return handlers


def _adopt(logger: logging.Logger) -> None:
    """Let a library that prints through a handler of its own print through ours, from WARNING."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.WARNING)


class _Formatter(logging.Formatter):
    """`2026-12-01T06:12:03Z INFO text`, with `rank 3` before the level on other ranks; UTC, so that hosts agree."""

    def __init__(self, rank: int) -> None:
        who = "" if rank == 0 else f"rank {rank} "
        super().__init__(f"%(asctime)s {who}%(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%SZ")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """The text without the newlines a Python warning ends with."""
        return super().format(record).rstrip("\n")


class _TerminalHandler(logging.Handler):
    """Writes to `sys.<stream_name>` as it is at that moment, above a progress bar if one is drawn."""

    def __init__(self, stream_name: str) -> None:
        super().__init__()
        self.name = _HANDLER_PREFIX + stream_name
        self._stream_name = stream_name

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; an error in doing so is reported, not raised."""
        try:
            stream = getattr(sys, self._stream_name)
            tqdm = sys.modules.get("tqdm")  # not imported: no bar
            if tqdm is None:
                stream.write(self.format(record) + "\n")
            else:
                tqdm.tqdm.write(self.format(record), file=stream)
            stream.flush()
        except Exception:
            self.handleError(record)
