"""Tiny runs of the real thing: deepy, workers, files. Each is a process of its own, with a hard timeout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SMOKE = "configs/smoke.yml"
COMMUNICATION = (
    *("grad_reduce_s", "exposed_grad_reduce_s", "hidden_fraction", "grad_reduce_bytes"),
    *("param_gather_s", "exposed_param_gather_s", "param_gather_bytes"),
)
TIMES = ("step_time_s", "tokens_per_s", "tflops_per_device", "mfu", "peak_memory_bytes", *COMMUNICATION)


def write_corpus(folder: Path) -> Path:
    """Write token files of this repository's own sources, a byte a token; return their prefix."""
    prefix = folder / "sources_text_document"
    tokenizer = build_tokenizer("CharLevelTokenizer", None)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for path in sorted((ROOT / "megatron").rglob("*.py"))[:20]:
            writer.add_document([*tokenizer.encode(path.read_text()), tokenizer.eod])
    return prefix


@dataclass
class TinyRun:
    """A model of a few thousand parameters on the corpus at `prefix`; everything it writes lies in `folder`."""

    prefix: Path
    folder: Path
    settings: dict[str, object] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """What deepy and train.py are given."""
        own = {"data_path": str(self.prefix), "log_dir": str(self.folder / "log files")}
        overrides = {**own, **self.settings}
        return [SMOKE, *(f"--set={key}={json.dumps(value)}" for key, value in overrides.items())]

    def command(self, *options: str, num_workers: int = 2) -> list[str]:
        """The deepy command of this run."""
        return [sys.executable, "deepy.py", "train.py", *self.arguments(), "--num_gpus", str(num_workers), *options]

    def train(self, *options: str, num_workers: int = 2, status: int = 0) -> str:
        """Run to the end, check the status, return what was printed."""
        done = subprocess.run(
            self.command(*options, num_workers=num_workers),
            env=environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def rows(self, *, without: tuple[str, ...] = TIMES) -> list[dict[str, object]]:
        """Rows of metrics.jsonl, less the fields that time decides."""
        lines = (self.folder / "log files" / "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key not in without} for line in lines]


def environment() -> dict[str, str]:
    """The environment of a run: one thread a worker."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
