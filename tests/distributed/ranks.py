"""Run a function on several ranks, joined by gloo or another backend, and collect what each returns.

A rank that hangs is named.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, backend: str = "gloo"
) -> list[Any]:
    """Call `function(rank, *args)` on `world_size` processes joined by `backend`; return the results in order of rank.

    `function` must be importable (a module-level function), its arguments and results picklable. The first rank that
    raises fails the test with its traceback; after `timeout_s` the ranks still running are named and killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Ranks are forked from a server that has imported torch and DeepSpeed and done nothing else: importing them
        # takes longer than most tests.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "deepspeed", "tests.distributed.toy"])
        processes = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, backend, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _join(processes, folder, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"result_{rank}").read_bytes()) for rank in range(world_size)]


def _join(processes: list[Any], folder: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    running = dict(enumerate(processes))
    while running:
        wait([process.sentinel for process in running.values()], timeout=max(0.0, deadline - time.monotonic()))
        for rank, process in list(running.items()):
            if process.is_alive():
                continue
            del running[rank]
            if process.exitcode != 0:
                error = Path(folder) / f"error_{rank}"
                text = error.read_text() if error.exists() else f"exit status {process.exitcode}, no traceback"
                raise AssertionError(f"rank {rank} failed:\n{text}")
        if running and time.monotonic() >= deadline:
            raise AssertionError(f"ranks {sorted(running)} still running after {timeout_s} s")


def _rank_main(
    rank: int, world_size: int, folder: str, backend: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = function(rank, *args)
        (Path(folder) / f"result_{rank}").write_bytes(pickle.dumps(result))
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"error_{rank}").write_text(traceback.format_exc())
        # Without waiting for peers that may be stuck in a collective this rank will never join.
        os._exit(1)
