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
COMMUNICATION = ("grad_reduce_s", "exposed_grad_reduce_s", "hidden_fraction", "grad_reduce_bytes")
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

    def configuration(self) -> Path:
        """Write the configuration file and return its path."""
        path = self.folder / "tiny run.yml"
        self.folder.mkdir(parents=True, exist_ok=True)
        base = {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "seq_length": 32,
            "pos_emb": "rotary",
            "no_weight_tying": True,
            "hidden_dropout": 0.1,
            "data_path": str(self.prefix),
            "tokenizer_type": "CharLevelTokenizer",
            "split": "90,5,5",
            "num_workers": 0,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
            "train_iters": 6,
            "eval_iters": 1,
            "eval_interval": 3,
            "log_interval": 1,
            "ddp_bucket_size": 4000,
            "log_dir": str(self.folder / "logs"),
            "distributed_timeout_seconds": 60,
            "train_batch_size": 8,
        }
        path.write_text(json.dumps({**base, **self.settings}, indent=1))
        return path

    def command(self, *options: str, num_workers: int = 2) -> list[str]:
        """The deepy command of this run."""
        deepy = [sys.executable, str(ROOT / "deepy.py"), str(ROOT / "train.py")]
        return [*deepy, str(self.configuration()), "--num_gpus", str(num_workers), *options]

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
        lines = (self.folder / "logs" / "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key not in without} for line in lines]


def environment() -> dict[str, str]:
    """The environment of a run: one thread a worker."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
