"""A training run from beginning to end: what `train.py` calls once its arguments are known."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import torch.distributed as dist

from megatron.errors import EXIT_OK, EXIT_RUN_AGAIN
from megatron.launch.environment import RankInfo
from megatron.launch.exit_record import ExitRecord, write_exit_record
from megatron.launch.exit_status import leave_status
from megatron.monitor.log import setup_logging
from megatron.neox_arguments import NeoXArgs
from megatron.training.directories import check_writable
from megatron.training.join_ranks import join_ranks
from megatron.training.setup import Run, set_up
from megatron.training.signals import StopSignals
from megatron.training.state import StopReason

_log = logging.getLogger(__name__)


def train_run(args: NeoXArgs, rank: RankInfo) -> int:
    """Train as `args` say and return the exit status: 0 when done, 75 when saved and to be run again.

    Collective over all ranks of the run.
    """
    log_dir = None if args.monitor.log_dir is None else Path(args.monitor.log_dir)
    check_writable(
        {
            "log_dir": args.monitor.log_dir,
            "save": args.checkpoint.save,
            "tensorboard_dir": args.monitor.tensorboard_dir,
        }
    )
    setup_logging(rank.rank, log_dir=log_dir)
    for notice in args.notices:
        _log.info("%s", notice)
    joined = join_ranks(args.parallelism, rank)
    try:
        with StopSignals() as signals:
            run = set_up(args, rank, joined, signals)
            record = _train(run, signals, saves=args.checkpoint.save is not None)
        if rank.rank == 0 and log_dir is not None:
            write_exit_record(log_dir, record)
        leave_status(record.code)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return record.code


def _train(run: Run, signals: StopSignals, *, saves: bool) -> ExitRecord:
    """Run the loop, evaluate at its end, and say how it ended."""
    if run.random_state is not None:
        run.random_state.restore()
    failed = True
    try:
        reason = run.loop.run(run.state)
        if reason is StopReason.FINISHED:
            run.evaluation.run("valid", run.state.iteration)
            run.evaluation.run("test", run.state.iteration)
        failed = False
    finally:
        run.loop.sinks.close(failed=failed)
    run.engine.close()
    code = _status(reason, signals, saves=saves)
    _log.info("iteration %d: training %s", run.state.iteration, reason.value)
    received = None if signals.received is None else signals.received.name
    return ExitRecord(code=code, reason=reason.value, iteration=run.state.iteration, signal=received)


def _status(reason: StopReason, signals: StopSignals, *, saves: bool) -> int:
    """75 asks to be run again, which makes sense only if something was saved; otherwise a signal ended the run."""
    if reason is not StopReason.SIGNAL:
        return EXIT_OK
    return EXIT_RUN_AGAIN if saves else 128 + (signals.received or signal.SIGTERM)
