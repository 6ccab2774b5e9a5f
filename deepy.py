#!/usr/bin/env python3
"""Start a training run: check the configuration, then start its workers.

python ./deepy.py train.py [-d DIR] a.yml b.yml [--num_gpus N] [-H hostfile] [--set key=value ...]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron.errors import ConfigError, run_main
from megatron.launch.command_line import WHOLE_MODEL_SCRIPTS, add_config_options
from megatron.launch.exit_record import remove_exit_record, settle_exit_record
from megatron.launch.hand_over import pack
from megatron.launch.hosts import chosen_slots, is_local, planned_world_size, run_on_hosts, runner_command
from megatron.launch.local import local_command, run_local
from megatron.neox_arguments import load_args
from megatron.neox_arguments.launch import LaunchArgs
from megatron.neox_arguments.whole_model import whole_model_overrides


def main() -> int:
    """Return the status of the run: 0 done, 2 bad configuration or input, 75 saved and to be run again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("script", help="what each worker runs: train.py, or generate.py, which has one")
    add_config_options(parser)
    parser.add_argument("--num_gpus", "--num-gpus", type=int, metavar="N", help="worker processes on each host")
    parser.add_argument("-H", "--hostfile", metavar="FILE", help="hosts to run on")
    options = parser.parse_intermixed_args()
    if not options.files and not options.set:
        parser.error("no configuration: name at least one YAML file")
    overrides = list(options.set)
    if options.num_gpus is not None:
        overrides.append(f"num_gpus={options.num_gpus}")
    if options.hostfile is not None:
        overrides.append(f"hostfile={json.dumps(options.hostfile, ensure_ascii=False)}")
    if not Path(options.script).is_file():
        raise ConfigError(
            f"script {options.script} does not exist: run from the root of the repository, or give its path"
        )

    if Path(options.script).name in WHOLE_MODEL_SCRIPTS:
        return _run_in_one_process(options, overrides)
    args = load_args(options.files, overrides=overrides, conf_dir=options.conf_dir, world_size=planned_world_size)
    handed_over, log_dir, slots = [pack(args.flat)], args.monitor.log_dir, chosen_slots(args.launch)
    if is_local(slots, args.launch):
        (local,) = slots.values()
        command = local_command(options.script, handed_over, local, args.launch)
        remove_exit_record(log_dir)
        status = run_local(command, options.script, len(local))
    else:
        remove_exit_record(log_dir)
        status = run_on_hosts(runner_command(options.script, handed_over, args.launch), slots, log_dir)
    settle_exit_record(log_dir, status)
    return status


def _run_in_one_process(options: argparse.Namespace, overrides: list[str]) -> int:
    """Run a script that has the whole model in one process, here, whatever run the configuration describes."""
    args = load_args(options.files, overrides=[*overrides, *whole_model_overrides()], conf_dir=options.conf_dir)
    command = local_command(options.script, [pack(args.flat)], (0,), LaunchArgs())
    return run_local(command, options.script, 1)


if __name__ == "__main__":
    run_main(main)
