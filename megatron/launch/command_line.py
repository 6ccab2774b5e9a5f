"""The command line of a worker: YAML files and options, or the configuration that deepy hands over."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.errors import ConfigError
from megatron.launch.environment import RankInfo, rank_info
from megatron.launch.hand_over import OPTION, unpack
from megatron.neox_arguments import NeoXArgs, load_args, load_flat
from megatron.neox_arguments.whole_model import whole_model_overrides, with_whole_model


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add what deepy and workers both take: files, where they are, and overrides.

    Parse with `parse_intermixed_args`: options may stand before, between and after the files.
    """
    parser.add_argument("files", nargs="*", metavar="FILE.yml", help="YAML files, merged left to right")
    parser.add_argument("-d", "--conf_dir", "--conf-dir", metavar="DIR", help="directory of the files")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value; null unsets it"
    )


# Scripts that do all their work in one process with the whole model, whatever run the configuration describes.
WHOLE_MODEL_SCRIPTS = frozenset({"generate.py"})


def arguments_from_command_line(
    argv: Sequence[str], description: str | None, *, whole_model: bool = False
) -> tuple[NeoXArgs, RankInfo]:
    """Return the arguments of this run and this process's place in it.

    With `whole_model` the processes of the run that the configuration describes need not be there: what it says of
    their number, and of the batch they share, is set aside.

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
        flat = unpack(options.megatron_config)
        if whole_model:
            return load_flat(with_whole_model(flat)), rank
        return load_flat(flat, world_size=rank.world_size), rank
    if not options.files and not options.set:
        raise ConfigError("no configuration: name at least one YAML file")
    if whole_model:
        overrides = [*options.set, *whole_model_overrides()]
        return load_args(options.files, overrides=overrides, conf_dir=options.conf_dir), rank
    args = load_args(options.files, overrides=options.set, conf_dir=options.conf_dir, world_size=rank.world_size)
    return args, rank
