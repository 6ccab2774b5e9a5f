"""Step times of our one path and of DeepSpeed's two engines, on the same model, samples, optimizer and loss.

Four systems in the same processes make a step each in turn (A B C D, then B C D A ...), so that whatever else the
machine does hits all of them. What counts are medians of paired ratios: a system's step over the first system's step of
the same round. Cells are the products of accumulation, ZeRO stage and number of processes.

    python tools/lab/engine_overhead.py configs/bench_20M.yml --json engine_overhead.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.runtime.pipe import PipelineModule  # noqa: E402

from megatron.data.micro_batch import MicroBatch  # noqa: E402
from megatron.engine.build import build_engine  # noqa: E402
from megatron.errors import ConfigError, run_main  # noqa: E402
from megatron.launch.environment import LOOPBACK, free_port  # noqa: E402
from megatron.model.decoder import Decoder, decoder_layers  # noqa: E402
from megatron.mpu.grid import build_grid  # noqa: E402
from megatron.mpu.tensor_parallel import NOT_SPLIT  # noqa: E402
from megatron.neox_arguments import NeoXArgs, deepspeed_config, load_args  # noqa: E402
from megatron.training import settings  # noqa: E402
from megatron.training.language_model import LanguageModel  # noqa: E402

_VOCABULARY = 8192
# Losses of the systems may differ by rounding only; more would mean that they are not doing the same work.
_SAME_LOSS = 1e-3
_COLLECTIVES = (
    *("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "all_gather", "broadcast"),
    *("reduce", "barrier"),
)


class System(Protocol):
    """One way to train."""

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Make one step; return the loss averaged over micro-batches and ranks."""
        ...


class OnePath:
    """Ours, with the pipeline size as the user gives it."""

    def __init__(self, args: NeoXArgs) -> None:
        grid = build_grid(pipe_parallel_size=args.parallelism.pipe_parallel_size, model_parallel_size=1)
        self._engine = build_engine(
            _model(args),
            grid=grid,
            deepspeed_config=deepspeed_config(args),
            dtype=torch.float32,
            reduction=settings.reduction_settings(args.parallelism),
            update=settings.update_rule(args.optimizer),
            rehearsal_batch=_micro_batches(args, 1, seed=0)[0],
        )

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Make one step."""
        return float(self._engine.train_batch(iter(micro_batches)).loss)


class PlainEngine:
    """DeepSpeed's plain engine, as trainers drive it: forward, backward and step for each micro-batch."""

    def __init__(self, args: NeoXArgs) -> None:
        deepspeed.utils.groups.mpu = None
        model = _model(args)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=_adamw(args, model), config=_deepspeed_config(args), dist_init_required=False
        )

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Make one step; losses are averaged once, at its end."""
        losses = []
        for micro_batch in micro_batches:
            loss = self._engine(micro_batch)
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        if dist.get_world_size() > 1:
            dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()


class PipelineEngine:
    """DeepSpeed's pipeline engine with one stage: a list of layers and a loss."""

    def __init__(self, args: NeoXArgs) -> None:
        deepspeed.utils.groups.mpu = None
        self._model = _model(args)
        module = PipelineModule(
            list(self._model.decoder.layers.values()),
            num_stages=1,
            loss_fn=self._model.loss,
            partition_method="uniform",
        )
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=_adamw(args, module), config=_deepspeed_config(args), dist_init_required=False
        )

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Make one step."""
        return float(self._engine.train_batch(self._model.split(micro_batch) for micro_batch in micro_batches))


def _model(args: NeoXArgs) -> LanguageModel:
    return LanguageModel(Decoder(decoder_layers(args.model, seed=args.training.seed, tensor_parallel=NOT_SPLIT)))


def _adamw(args: NeoXArgs, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused AdamW with our parameter groups, and the rate of the first update in all of them."""
    rule = settings.update_rule(args.optimizer)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": rule.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rule.schedule.peak, betas=rule.betas, eps=rule.eps, fused=True)


def _deepspeed_config(args: NeoXArgs) -> dict[str, Any]:
    """Return what a NeoX user hands DeepSpeed. Its buckets hold the whole model, as NeoX's 500 M elements do."""
    zero = {
        "stage": args.parallelism.zero_stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 50_000_000,
        "allgather_bucket_size": 50_000_000,
    }
    return {
        "train_micro_batch_size_per_gpu": args.training.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": args.training.gradient_accumulation_steps,
        "gradient_clipping": args.optimizer.gradient_clipping,
        "zero_optimization": zero if args.parallelism.zero_stage else {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def _micro_batches(args: NeoXArgs, number: int, *, seed: int) -> list[MicroBatch]:
    """Random tokens, the same for every system and others on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    shape = (args.training.train_micro_batch_size_per_gpu, args.model.seq_length + 1)
    tokens = [torch.randint(_VOCABULARY, shape, generator=generator) for _ in range(number)]
    return [MicroBatch(t[:, :-1], t[:, 1:], torch.ones(t[:, 1:].shape)) for t in tokens]


@dataclass(frozen=True)
class Cell:
    """What is compared under."""

    num_processes: int
    zero_stage: int
    accumulation: int


@dataclass(frozen=True)
class Result:
    """A system's median step time, and the median and quartiles of its paired ratio to the first system.

    `collectives` and `device_waits` are calls of torch.distributed and of the accelerator's `synchronize` in one step.
    """

    num_processes: int
    zero_stage: int
    accumulation: int
    system: str
    step_time_s: float
    ratio: float
    ratio_lower_quartile: float
    ratio_upper_quartile: float
    num_rounds: int
    collectives: int
    device_waits: int


def measure(config: str, overrides: Sequence[str], cell: Cell, *, num_rounds: int) -> list[Result]:
    """Build the systems and compare them. Collective over the world; times are rank 0's."""

    def arguments(pipe: int) -> NeoXArgs:
        chosen = {
            "pipe_parallel_size": pipe,
            "zero_stage": cell.zero_stage,
            "gradient_accumulation_steps": cell.accumulation,
            "padded_vocab_size": _VOCABULARY,
            "precision": "fp32",
            "warmup": 0.0,
            "lr_decay_style": "constant",
        }
        written = [f"{key}={json.dumps(value)}" for key, value in chosen.items()]
        return load_args([config], overrides=[*overrides, *written], world_size=cell.num_processes)

    zero = arguments(0)
    systems: dict[str, System] = {
        "ours, pipe_parallel_size 0": OnePath(zero),
        "ours, pipe_parallel_size 1": OnePath(arguments(1)),
        "DeepSpeed, plain engine": PlainEngine(zero),
        "DeepSpeed, pipeline of one stage": PipelineEngine(zero),
    }
    counts = _warm_up(zero, systems)
    rounds: list[dict[str, float]] = []
    for number in range(num_rounds):
        micro_batches = _micro_batches(zero, cell.accumulation, seed=100 + number)
        first = number % len(systems)
        order = [*itertools.islice(itertools.cycle(systems), first, first + len(systems))]
        rounds.append({name: _timed(systems[name], micro_batches) for name in order})
    base = next(iter(systems))
    return [_summed_up(cell, name, base, rounds, counts[name]) for name in systems]


def _warm_up(args: NeoXArgs, systems: dict[str, System]) -> dict[str, tuple[int, int]]:
    """Make the first steps, check that all systems compute the same, and count what they call in the last one."""
    counts = {}
    num_steps = 4  # DeepSpeed's timers start to wait for the device in the third
    for number in range(num_steps):
        micro_batches = _micro_batches(args, args.training.gradient_accumulation_steps, seed=number)
        losses = {}
        for name, system in systems.items():
            with _counted(_COLLECTIVES, dist) as collectives, _counted(["synchronize"], get_accelerator()) as waits:
                losses[name] = system.step(micro_batches)
            counts[name] = (len(collectives), len(waits))
        if max(losses.values()) - min(losses.values()) > _SAME_LOSS:
            raise ConfigError(f"the systems do not compute the same: losses of step {number + 1} are {losses}")
    return counts


@contextmanager
def _counted(names: Sequence[str], owner: Any) -> Iterator[list[str]]:
    """Note calls of functions of `owner` by name."""
    calls: list[str] = []

    def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        return call

    with ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name), name)))
        yield calls


def _timed(system: System, micro_batches: Sequence[MicroBatch]) -> float:
    """Seconds a step takes, begun by all ranks together. It ends when its loss is known."""
    dist.barrier()
    start = time.perf_counter()
    system.step(micro_batches)
    return time.perf_counter() - start


def _summed_up(cell: Cell, name: str, base: str, rounds: Sequence[dict[str, float]], counts: tuple[int, int]) -> Result:
    ratios = [times[name] / times[base] for times in rounds]
    lower, median, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Result(
        cell.num_processes,
        cell.zero_stage,
        cell.accumulation,
        name,
        step_time_s=statistics.median(times[name] for times in rounds),
        ratio=median,
        ratio_lower_quartile=lower,
        ratio_upper_quartile=upper,
        num_rounds=len(rounds),
        collectives=counts[0],
        device_waits=counts[1],
    )


def run_worker(options: argparse.Namespace) -> None:
    """Measure all cells of this number of processes; rank 0 writes the results."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    results = []
    for zero_stage, accumulation in itertools.product(options.zero, options.accumulation):
        cell = Cell(dist.get_world_size(), zero_stage, accumulation)
        results.extend(measure(options.config, options.set, cell, num_rounds=options.rounds))
    if dist.get_rank() == 0:
        Path(options.worker).write_text(json.dumps([asdict(result) for result in results]))
    dist.barrier()
    dist.destroy_process_group()


def start_workers(num_processes: int) -> list[dict[str, Any]]:
    """Run this program again on `num_processes` ranks, each on a core to itself while there are enough."""
    port, num_cores = free_port(), os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        ranks = [
            subprocess.Popen(
                ["taskset", "-c", str(rank % num_cores), sys.executable, *sys.argv, "--worker", str(output)],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(num_processes),
                    "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": str(port),
                },
                stdout=subprocess.DEVNULL,
            )
            for rank in range(num_processes)
        ]
        statuses = [rank.wait() for rank in ranks]
        if any(statuses):
            raise ConfigError(f"the ranks ended with statuses {statuses}")
        results: list[dict[str, Any]] = json.loads(output.read_text())
    return results


def print_table(results: Sequence[Result]) -> None:
    """Print the results as Markdown."""
    print("| processes | ZeRO | accumulation | system | step ms | ratio (quartiles) | collectives | device waits |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for result in results:
        ratio = f"{result.ratio:.3f} ({result.ratio_lower_quartile:.3f} to {result.ratio_upper_quartile:.3f})"
        print(
            f"| {result.num_processes} | {result.zero_stage} | {result.accumulation} | {result.system} | "
            f"{1e3 * result.step_time_s:.1f} | {ratio} | {result.collectives} | {result.device_waits} |"
        )


def main() -> None:
    """Print a line for each cell and system, and the load of the machine; write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the config"
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 1], choices=[0, 1])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=20, help="steps each system makes in each cell")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        run_worker(options)
        return
    load_before = os.getloadavg()[0]
    results = [Result(**row) for number in options.processes for row in start_workers(number)]
    load = {"before": round(load_before, 2), "after": round(os.getloadavg()[0], 2), "cores": os.cpu_count()}
    print_table(results)
    print(f"\nload of the machine in the minute before: {load['before']}; at the end: {load['after']}")
    if options.json is not None:
        rows = [asdict(result) for result in results]
        options.json.write_text(json.dumps({"load": load, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
