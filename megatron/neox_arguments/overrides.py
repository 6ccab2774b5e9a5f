"""`--set key=value`: after the files, and stronger, however the files say the same thing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.errors import ConfigError
from megatron.neox_arguments.nested import WAYS_OF_SAYING, Path
from megatron.neox_arguments.yaml_files import Setting, parse_value

_ORIGIN = "--set"


def apply_overrides(settings: Mapping[str, Setting], overrides: Sequence[str]) -> dict[str, Setting]:
    """Return `settings` with each `key=value` applied, in order.

    The value is YAML; null unsets the key. A dot reaches into a nested value: `optimizer.params.lr=1e-4`. Other ways of
    saying what is set are taken out: `precision=bfloat16` wins over a block `fp16: {enabled: true}`.
    """
    result = dict(settings)
    for override in overrides:
        key, separator, text = override.partition("=")
        path = tuple(part.strip().replace("-", "_") for part in key.split("."))
        if not separator or not all(path):
            raise ConfigError(f"--set {override}: write key=value")
        value = parse_value(text) if text.strip() else ""
        _put(result, path, value)
        for said in _said(path, value):
            _take_out_other_ways(result, said)
    return result


def _put(settings: dict[str, Setting], path: Path, value: object) -> None:
    name, *inner = path
    if not inner:
        settings.pop(name, None)
        if value is not None:
            settings[name] = Setting(value, _ORIGIN)
        return
    earlier = settings.get(name)
    outer = {} if earlier is None or earlier.value is None else copy.deepcopy(earlier.value)
    target = outer
    for part in inner[:-1]:
        if isinstance(target, dict):
            target[part] = {} if target.get(part) is None else target[part]
            target = target[part]
    if not isinstance(target, dict):
        raise ConfigError(f"--set {'.'.join(path)}: {name} has no nested values to set")
    _drop(target, inner[-1])
    if value is not None:
        target[inner[-1]] = value
    parts = {**(earlier.parts if earlier else {}), ".".join(inner): _ORIGIN}
    settings[name] = Setting(outer, earlier.origin if earlier else _ORIGIN, parts)


def _drop(target: dict[str, Any], name: str) -> None:
    for key in [key for key in target if isinstance(key, str) and key.replace("-", "_") == name]:
        del target[key]


def _said(path: Path, value: object) -> Iterator[Path]:
    """Yield the path of each value that an override gives; unsetting says nothing."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _said((*path, str(name).replace("-", "_")), inner)
    elif value is not None:
        yield path


def _take_out_other_ways(settings: dict[str, Setting], said: Path) -> None:
    """Unset whatever says the same under another key; one key's own values are the user's to agree on."""
    for ways in WAYS_OF_SAYING:
        if said not in ways:
            continue
        for name, *inner in ways:
            if name == said[0] or name not in settings:
                continue
            if not inner:
                del settings[name]
                continue
            outer = copy.deepcopy(settings[name].value)
            target = outer
            for part in inner[:-1]:
                target = target.get(part) if isinstance(target, dict) else None
            if isinstance(target, dict):
                _drop(target, inner[-1])
            settings[name] = replace(settings[name], value=outer)
