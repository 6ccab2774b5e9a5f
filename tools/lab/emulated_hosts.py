"""Compare variants of one configuration on emulated hosts with links of a given bandwidth.

Network namespaces stand for the hosts, a bridge in another one for the switch between them; what each host sends is
shaped with a token bucket (`tc ... tbf`). One rank runs on each host, on a core to itself while there are enough, else
on an equal share.
Variants run in turn (A B A B), and what is printed are medians and ratios to the first: absolute times of such a
machine mean little. Needs root, `ip` and `tc`.

    python tools/lab/emulated_hosts.py configs/bench_20M.yml --bandwidth 1gbit \\
        --variant off:overlap_grad_reduce=false --variant on:overlap_grad_reduce=true
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.errors import ConfigError, run_main  # noqa: E402
from megatron.launch.environment import free_port  # noqa: E402
from tools.lab.cpu_share import equal_shares  # noqa: E402

# A burst of about ten milliseconds at 1 Gbit; a smaller one would throttle below the rate.
_BURST = "1mbit"


@dataclass(frozen=True)
class Variant:
    """A name, and overrides of the configuration."""

    name: str
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read `name:key=value,key=value`."""
        name, _, overrides = text.partition(":")
        return cls(name, tuple(filter(None, overrides.split(","))))


@contextmanager
def emulated_hosts(num_hosts: int, bandwidth: str) -> Iterator[list[str]]:
    """Namespaces on one switch, each with a shaped link; gives their names, and takes them down whatever happens.

    Raises ConfigError where this process may not do that.
    """
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise ConfigError("emulated hosts need root and the programs ip and tc (Debian: iproute2)")
    switch = f"neox{os.getpid()}s"
    hosts = [f"neox{os.getpid()}h{index}" for index in range(num_hosts)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for index, host in enumerate(hosts):
            _ip("netns", "add", host)
            _connect(host, switch, index, bandwidth)
        yield hosts
    finally:
        for namespace in (*hosts, switch):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _connect(host: str, switch: str, index: int, bandwidth: str) -> None:
    """Give a host its link to the switch, address and rate."""
    port = f"port{index}"
    _ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "switch")
    _ip("-n", switch, "link", "set", port, "up")
    _ip("-n", host, "address", "add", f"10.77.0.{index + 1}/24", "dev", "eth0")
    _ip("-n", host, "link", "set", "eth0", "up")
    _ip("-n", host, "link", "set", "lo", "up")
    shape = ["tbf", "rate", bandwidth, "burst", _BURST, "latency", "100ms"]
    subprocess.run(["tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", *shape], check=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def run_once(
    hosts: Sequence[str], shares: Sequence[Sequence[str]], config: str, overrides: Sequence[str]
) -> dict[str, float]:
    """Train with a rank on each host; return medians over the rows after the first two."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--set={override}" for override in (*overrides, f"log_dir={folder}", "log_interval=1")]
        port, num_cores = free_port(), os.cpu_count() or 1
        ranks = [
            subprocess.Popen(
                [*shares[rank], *_on(host, core=rank % num_cores), sys.executable, "train.py", config, *options],
                cwd=ROOT,
                env={**os.environ, **_environment(rank, len(hosts), port)},
                stdout=subprocess.DEVNULL,
            )
            for rank, host in enumerate(hosts)
        ]
        statuses = [rank.wait() for rank in ranks]
        if any(statuses):
            raise ConfigError(f"the ranks ended with statuses {statuses}")
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    timed = [row for row in rows if "step_time_s" in row][2:]
    fields = ("step_time_s", "grad_reduce_s", "exposed_grad_reduce_s")
    return {field: statistics.median(row[field] for row in timed) for field in fields}


def _on(host: str, *, core: int) -> list[str]:
    return ["ip", "netns", "exec", host, "taskset", "-c", str(core)]


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }


@dataclass(frozen=True)
class Result:
    """Medians over the rounds of one variant at one bandwidth, in seconds a step, with the range of the step time."""

    bandwidth: str
    variant: str
    step_time_s: float
    fastest_s: float
    slowest_s: float
    ratio: float
    grad_reduce_s: float
    exposed_grad_reduce_s: float


def compare(config: str, num_hosts: int, bandwidth: str, variants: Sequence[Variant], rounds: int) -> list[Result]:
    """Run the variants in turn, `rounds` times, and sum them up; ratios are to the first variant."""
    runs: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in variants}
    with emulated_hosts(num_hosts, bandwidth) as hosts, equal_shares(num_hosts) as shares:
        for _ in range(rounds):
            for variant in variants:
                runs[variant.name].append(run_once(hosts, shares, config, variant.overrides))

    def median(name: str, field: str) -> float:
        return statistics.median(run[field] for run in runs[name])

    base_s = median(variants[0].name, "step_time_s")
    return [
        Result(
            bandwidth=bandwidth,
            variant=name,
            step_time_s=median(name, "step_time_s"),
            fastest_s=min(run["step_time_s"] for run in runs[name]),
            slowest_s=max(run["step_time_s"] for run in runs[name]),
            ratio=median(name, "step_time_s") / base_s,
            grad_reduce_s=median(name, "grad_reduce_s"),
            exposed_grad_reduce_s=median(name, "exposed_grad_reduce_s"),
        )
        for name in runs
    ]


def print_table(results: Sequence[Result]) -> None:
    """Print the results as Markdown."""
    print("| link | variant | step s (min to max) | ratio | in flight s | exposed s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for result in results:
        spread = f"{result.step_time_s:.3f} ({result.fastest_s:.3f} to {result.slowest_s:.3f})"
        print(
            f"| {result.bandwidth} | {result.variant} | {spread} | {result.ratio:.3f} | {result.grad_reduce_s:.3f} | "
            f"{result.exposed_grad_reduce_s:.3f} |"
        )


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw step times as bars: what computes and what waits for the network. Needs matplotlib."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(results) + 1.2))
    labels = [f"{result.bandwidth}, {result.variant}" for result in results]
    exposed = [result.exposed_grad_reduce_s for result in results]
    computed = [result.step_time_s - waited for result, waited in zip(results, exposed, strict=True)]
    axes.barh(labels, computed, color="#4c72b0", label="everything else")
    axes.barh(labels, exposed, left=computed, color="#dd8452", label="waiting for the reduction")
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Print a line for each bandwidth and variant; write JSON and draw a figure where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts, a rank on each")
    parser.add_argument("--bandwidth", action="append", required=True, help="rate of each host's link, as tc writes it")
    parser.add_argument("--variant", action="append", required=True, type=Variant.parse, metavar="NAME:KEY=VALUE,...")
    parser.add_argument("--rounds", type=int, default=3, help="times each variant runs, in turn")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--figure", type=Path, help="file to draw them into: .svg or .png")
    options = parser.parse_args()
    results = [
        result
        for bandwidth in options.bandwidth
        for result in compare(options.config, options.hosts, bandwidth, options.variant, options.rounds)
    ]
    print_table(results)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if options.figure is not None:
        draw(results, options.figure)


if __name__ == "__main__":
    run_main(main)
