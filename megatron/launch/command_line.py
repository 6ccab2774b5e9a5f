"""The command line of a worker: YAML files and options, or the configuration that deepy hands over."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.errors import ConfigError
from megatron.launch.environment import RankInfo, rank_info
from megatron.launch.hand_over import OPTION, unpack
from megatron.neox_arguments import NeoXArgs, load_args, load_flat


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add what deepy and workers both take: files, where they are, and overrides.

    Parse with `parse_intermixed_args`: options may stand before, between and after the files.
    """
    parser.add_argument("files", nargs="*", metavar="FILE.yml", help="YAML files, merged left to right")
    parser.add_argument("-d", "--conf_dir", "--conf-dir", metavar="DIR", help="directory of the files")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value; null unsets it"
    )


def arguments_from_command_line(argv: Sequence[str], description: str | None) -> tuple[NeoXArgs, RankInfo]:
    """Return the arguments of this run and this process's place in it.

    Raises ConfigError; argparse exits with 2 on its own for an unknown option.
    """
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add_config_options(parser)
    parser.add_argument(OPTION, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    options = parser.parse_intermixed_args(argv)
    rank = rank_info()
    if options.megatron_config is not None:
        if options.files or options.set:
            raise ConfigError(f"{OPTION} is a whole configuration: give no files or --set with it")
        return load_flat(unpack(options.megatron_config), world_size=rank.world_size), rank
    if not options.files and not options.set:
        raise ConfigError("no configuration: name at least one YAML file")
    args = load_args(options.files, overrides=options.set, conf_dir=options.conf_dir, world_size=rank.world_size)
    return args, rank
