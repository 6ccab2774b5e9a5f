#!/usr/bin/env python3
"""Start a training run: check the configuration, then start its workers.

python ./deepy.py train.py [-d DIR] a.yml b.yml [--num_gpus N] [-H hostfile] [--set key=value ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.errors import ConfigError, run_main
from megatron.launch.command_line import add_config_options
from megatron.launch.hand_over import pack
from megatron.launch.hosts import planned_world_size, run_on_hosts, runner_command, uses_several_hosts
from megatron.launch.local import local_command, num_local_workers, run_local
from megatron.neox_arguments import load_args


def main() -> int:
    """Return the status of the run: 0 done, 2 bad configuration or input, 75 saved and to be run again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", help="what each worker runs: train.py")
    add_config_options(parser)
    parser.add_argument("--num_gpus", type=int, metavar="N", help="worker processes on each host")
    parser.add_argument("-H", "--hostfile", metavar="FILE", help="hosts to run on")
    options = parser.parse_args()
    if not Path(options.script).is_file():
        raise ConfigError(f"script {options.script} not found")
    if not options.files:
        raise ConfigError("no configuration: name at least one YAML file")
    overrides = list(options.set)
    if options.num_gpus is not None:
        overrides.append(f"num_gpus={options.num_gpus}")
    if options.hostfile is not None:
        overrides.append(f"hostfile={options.hostfile}")

    args = load_args(options.files, overrides=overrides, conf_dir=options.conf_dir, world_size=planned_world_size)
    handed_over = [pack(args.flat)]
    if uses_several_hosts(args.launch):
        return run_on_hosts(runner_command(options.script, handed_over, args.launch))
    num_workers = num_local_workers(args.launch)
    return run_local(local_command(options.script, handed_over, num_workers, args.launch), num_workers)


if __name__ == "__main__":
    run_main(main)
