"""From the monitor arguments to the sinks of this rank."""

import sys
from collections.abc import Mapping
from pathlib import Path

from megatron.monitor.console import ConsoleSink, ProgressSink, can_draw_bar
from megatron.monitor.jsonl import JsonlSink
from megatron.monitor.sink import Sink, Sinks
from megatron.monitor.tensorboard_sink import TensorBoardSink
from megatron.monitor.wandb_sink import WandbSink
from megatron.neox_arguments.monitor import MonitorArgs


def build_sinks(
    args: MonitorArgs,
    *,
    is_rank_0: bool,
    start_iteration: int,
    total_iterations: int,
    config: Mapping[str, object],
) -> Sinks:
    """All sinks `args` asks for on rank 0, none elsewhere.

    `start_iteration` is the iteration of the checkpoint the run continues, 0 for a fresh one; what an earlier run
    recorded after it is superseded. `config` is the run's configuration, as wandb shows it. wandb, TensorBoard and
    tqdm are imported only by the sinks that need them. Raises ConfigError when wandb cannot start.
    """
    if not is_rank_0:
        return Sinks([])
    sinks: list[Sink] = [ConsoleSink(total_iterations=total_iterations)]
    if args.log_dir:
        sinks.append(JsonlSink(Path(args.log_dir), start_iteration=start_iteration))
    if args.tensorboard_dir:
        sinks.append(TensorBoardSink(Path(args.tensorboard_dir), start_iteration=start_iteration))
    if args.use_wandb:
        sinks.append(WandbSink(args, start_iteration=start_iteration, config=config))
    if can_draw_bar(sys.stderr):
        sinks.append(
            ProgressSink(start_iteration=start_iteration, total_iterations=total_iterations, stream=sys.stderr)
        )
    return Sinks(sinks)
