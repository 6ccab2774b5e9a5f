"""All arguments of a run: loaded, checked, derived, frozen."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron.errors import ConfigError
from megatron.neox_arguments import derive, nested
from megatron.neox_arguments.checkpoint import CheckpointArgs
from megatron.neox_arguments.data import DataArgs
from megatron.neox_arguments.deepspeed import DeepspeedArgs
from megatron.neox_arguments.known import HINTS, PARTLY_SUPPORTED, UNSUPPORTED
from megatron.neox_arguments.launch import LaunchArgs
from megatron.neox_arguments.model import ModelArgs
from megatron.neox_arguments.monitor import MonitorArgs
from megatron.neox_arguments.optimizer import OptimizerArgs
from megatron.neox_arguments.overrides import apply_overrides
from megatron.neox_arguments.parallelism import ParallelismArgs
from megatron.neox_arguments.section import Section
from megatron.neox_arguments.supported import check_supported
from megatron.neox_arguments.text_generation import TextGenerationArgs
from megatron.neox_arguments.training import TrainingArgs
from megatron.neox_arguments.yaml_files import Setting, read_files
from megatron.neox_arguments.yaml_values import same_value, shown


class NeoXArgs(BaseModel):
    """The arguments by section. Frozen: what a run learns later (iteration, tokenizer, groups) lives elsewhere.

    `flat` holds what the user set, as it was set, for handing on to workers; `origins` says where each key was set.
    """

    model_config = ConfigDict(frozen=True)

    model: ModelArgs
    parallelism: ParallelismArgs
    optimizer: OptimizerArgs
    data: DataArgs
    training: TrainingArgs
    checkpoint: CheckpointArgs
    monitor: MonitorArgs
    launch: LaunchArgs
    text_generation: TextGenerationArgs
    deepspeed: DeepspeedArgs
    flat: dict[str, Any]
    origins: dict[str, str]
    notices: tuple[str, ...]

    def with_vocabulary(self, vocab_size: int) -> NeoXArgs:
        """Return these arguments with the padded vocabulary of a tokenizer of `vocab_size` entries.

        Raises ConfigError when `padded_vocab_size` was set to less.
        """
        wanted = self.model.padded_vocab_size
        padded = wanted or derive.pad_vocab_size(
            vocab_size, self.model.make_vocab_size_divisible_by, self.parallelism.model_parallel_size
        )
        if padded < vocab_size:
            raise ConfigError(f"padded_vocab_size {padded} is less than the {vocab_size} entries of the tokenizer")
        return self.model_copy(update={"model": self.model.model_copy(update={"padded_vocab_size": padded})})


_SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in NeoXArgs.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
_TAKES_NULL = {
    key
    for section in _SECTIONS.values()
    for key, field in section.model_fields.items()
    if type(None) in get_args(field.annotation)
}
_SECTION_OF = {key: name for name, section in _SECTIONS.items() for key in section.model_fields}


WorldSize = int | Callable[[LaunchArgs], int] | None


def load_args(
    paths: Sequence[str | Path],
    *,
    overrides: Sequence[str] = (),
    conf_dir: str | Path | None = None,
    world_size: WorldSize = None,
) -> NeoXArgs:
    """Read YAML files, merged left to right, apply `key=value` overrides, check and derive everything.

    `world_size` is a number, or what works it out from the launch section; None takes `num_gpus` x `num_nodes`, or 1.
    Raises ConfigError with one message that has every problem found on the way.
    """
    return _build(apply_overrides(read_files(paths, conf_dir), overrides), world_size)


def load_flat(flat: Mapping[str, Any], *, world_size: WorldSize = None) -> NeoXArgs:
    """Build arguments from keys and values as `NeoXArgs.flat` holds them."""
    return _build({key: Setting(value, "the launcher") for key, value in flat.items()}, world_size)


def _build(settings: dict[str, Setting], world_size: WorldSize) -> NeoXArgs:
    flat, notices = nested.flatten(settings)
    problems: list[str] = []
    by_section: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for key, setting in flat.items():
        if key in _SECTION_OF:
            # NeoX writes null for unset, also where null is no value of the argument.
            if setting.value is not None or key in _TAKES_NULL:
                by_section[_SECTION_OF[key]][key] = setting.value
        elif key in HINTS:
            notices.append(f"{key}: {HINTS[key]}")
        elif key in PARTLY_SUPPORTED and PARTLY_SUPPORTED[key][0](setting.value):
            notices.append(f"{key}: {PARTLY_SUPPORTED[key][1]}")
        else:
            problems.extend(_problem_of_foreign_key(key, setting))
    sections: dict[str, Any] = {}
    for name, section in _SECTIONS.items():
        try:
            sections[name] = section(**by_section[name])
        except ValidationError as error:  # noqa: PERF203 - every problem at once
            problems.extend(_problems_of_section(error, flat))
    if problems:
        raise ConfigError("\n".join(problems))
    return _derived(sections, settings, notices, world_size)


def _derived(
    sections: dict[str, Any], settings: Mapping[str, Setting], notices: list[str], given: WorldSize
) -> NeoXArgs:
    launch: LaunchArgs = sections["launch"]
    world_size = given(launch) if callable(given) else given or (launch.num_gpus or 1) * max(launch.num_nodes, 1)
    sections["model"] = derive.derive_model(sections["model"])
    sections["parallelism"] = derive.derive_parallelism(sections["parallelism"], sections["optimizer"], world_size)
    sections["training"] = derive.derive_training(sections["training"], sections["parallelism"].data_parallel_size)
    sections["optimizer"] = derive.derive_optimizer(sections["optimizer"], sections["training"].train_iters)
    derive.check_checkpoint(sections["checkpoint"])
    check_supported(sections["parallelism"], sections["optimizer"])
    return NeoXArgs(
        **sections,
        flat={key: setting.value for key, setting in settings.items()},
        origins={key: setting.origin for key, setting in settings.items()},
        notices=tuple(notices),
    )


def _problem_of_foreign_key(key: str, setting: Setting) -> list[str]:
    """A key that is not ours: known to NeoX and left at its default, known and refused, or unknown."""
    if key in PARTLY_SUPPORTED:
        return [
            f"{key}: {shown(setting.value)} ({setting.origin}): known NeoX argument, this value is not supported here "
            "yet"
        ]
    known = UNSUPPORTED.get(key)
    if known is not None:
        if setting.value is None or same_value(setting.value, known.default):
            return []
        return [
            f"{key}: {shown(setting.value)} ({setting.origin}): known NeoX argument, not supported here yet; only "
            f"{known.default!r} is accepted ({known.reason})"
        ]
    names = [*_SECTION_OF, *UNSUPPORTED, *HINTS, *PARTLY_SUPPORTED, "optimizer", "zero_optimization", "fp16", "bf16"]
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return [f"unknown key {key} ({setting.origin}){hint}"]


def _problems_of_section(error: ValidationError, flat: Mapping[str, Setting]) -> list[str]:
    problems = []
    for detail in error.errors():
        path = [str(part) for part in detail["loc"]]
        key = path[0]
        if detail["type"] == "missing":
            problems.append(f"{key} is not set, and has no default")
            continue
        origin = flat[key].origin if key in flat else "default"
        problems.append(f"{'.'.join(path)}: {shown(detail['input'])} ({origin}): {_reason(detail['msg'])}")
    return problems


def _reason(message: str) -> str:
    text = message.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
