"""All arguments of a run: loaded, checked, derived, frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron.errors import ConfigError
from megatron.neox_arguments import derive, nested
from megatron.neox_arguments.checkpoint import CheckpointArgs
from megatron.neox_arguments.data import DataArgs
from megatron.neox_arguments.deepspeed import DeepspeedArgs
from megatron.neox_arguments.derive import WorldSize
from megatron.neox_arguments.foreign_keys import notice_of, problem_of
from megatron.neox_arguments.launch import LaunchArgs
from megatron.neox_arguments.model import ModelArgs
from megatron.neox_arguments.monitor import MonitorArgs
from megatron.neox_arguments.optimizer import OptimizerArgs
from megatron.neox_arguments.overrides import apply_overrides
from megatron.neox_arguments.parallelism import ParallelismArgs
from megatron.neox_arguments.section import Section
from megatron.neox_arguments.tensor_split import notices_of_split
from megatron.neox_arguments.text_generation import TextGenerationArgs
from megatron.neox_arguments.training import TrainingArgs
from megatron.neox_arguments.yaml_files import Setting, read_files
from megatron.neox_arguments.yaml_values import shown
from megatron.neox_arguments.zero3 import notices_of_zero3


class NeoXArgs(BaseModel):
    """The arguments by section. Frozen: what a run learns later (iteration, tokenizer, groups) lives elsewhere.

    `flat` holds what the user set, as it was set, for handing on to workers; `load_flat` makes the same of it.
    `origins` says of every argument where its value comes from: `file:line`, `--set`, "default" or "derived".
    `notices` are lines about values that have no effect here.
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
        return self.model_copy(
            update={
                "model": self.model.model_copy(update={"padded_vocab_size": padded}),
                "origins": self.origins if wanted else {**self.origins, "padded_vocab_size": "derived"},
            }
        )


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


def load_args(
    paths: Sequence[str | Path],
    *,
    overrides: Sequence[str] = (),
    conf_dir: str | Path | None = None,
    world_size: WorldSize = None,
) -> NeoXArgs:
    """Read YAML files, merged left to right, apply `key=value` overrides, check and derive everything.

    `world_size` is a number, or what works it out from the launch section; None takes `num_gpus` x `num_nodes`, and
    where that is not set either the smallest number of processes that hold the model. Raises ConfigError with one
    message that has every problem, a line each.
    """
    return _build(apply_overrides(read_files(paths, conf_dir), overrides), world_size)


def load_flat(flat: Mapping[str, Any], *, world_size: WorldSize = None) -> NeoXArgs:
    """Build arguments from keys and values as `NeoXArgs.flat` holds them."""
    return _build({key: Setting(value, "the launcher") for key, value in flat.items()}, world_size)


def _build(settings: dict[str, Setting], world_size: WorldSize) -> NeoXArgs:
    flat, notices, problems = nested.flatten(settings)
    is_whole = not problems  # a nested value that could not be taken apart may have held what is missing
    by_section: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for key, setting in flat.items():
        if key in _SECTION_OF:
            # NeoX writes null for unset, also where null is no value of the argument.
            if setting.value is not None or key in _TAKES_NULL:
                by_section[_SECTION_OF[key]][key] = setting.value
        elif problem := problem_of(key, setting, _SECTION_OF):
            problems.append(problem)
        elif notice := notice_of(key, setting):
            notices.append(notice)
    sections: dict[str, Any] = {}
    for name, section in _SECTIONS.items():
        try:
            sections[name] = section(**by_section[name])
        except ValidationError as error:  # noqa: PERF203 - every problem at once
            problems.extend(_problems_of_section(error, flat, name_missing=is_whole))
    derived = derive.derive(sections, world_size, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    notices.extend(notices_of_split(derived["parallelism"]))
    notices.extend(notices_of_zero3(derived["parallelism"], derived["deepspeed"]))
    return NeoXArgs(
        **derived,
        flat={key: setting.value for key, setting in settings.items()},
        origins={**_origins(derived, flat), **{key: setting.origin for key, setting in settings.items()}},
        notices=tuple(notices),
    )


def _origins(sections: Mapping[str, Section], flat: Mapping[str, Setting]) -> dict[str, str]:
    """Say of every argument where its value comes from: the place that set it, "default" or "derived"."""
    origins = {}
    for key, name in _SECTION_OF.items():
        field = _SECTIONS[name].model_fields[key]
        if key in flat and (flat[key].value is not None or key in _TAKES_NULL):
            origins[key] = flat[key].origin
        else:
            origins[key] = "default" if getattr(sections[name], key) == field.default else "derived"
    return origins


def _problems_of_section(error: ValidationError, flat: Mapping[str, Setting], *, name_missing: bool) -> list[str]:
    problems = []
    for detail in error.errors():
        path = [str(part) for part in detail["loc"]]
        key = path[0]
        if detail["type"] == "missing":
            if name_missing:
                problems.append(f"{key} is not set, and has no default")
            continue
        origin = flat[key].origin if key in flat else "default"
        problems.append(f"{'.'.join(path)}: {shown(detail['input'])} ({origin}): {_reason(detail['msg'])}")
    return problems


def _reason(message: str) -> str:
    text = message.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
