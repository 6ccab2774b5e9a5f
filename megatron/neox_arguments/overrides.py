"""`--set key=value`: after the files, and stronger."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from megatron.errors import ConfigError
from megatron.neox_arguments.yaml_files import Setting, parse_value

_ORIGIN = "--set"


def apply_overrides(settings: Mapping[str, Setting], overrides: Sequence[str]) -> dict[str, Setting]:
    """Return `settings` with each `key=value` applied, in order.

    The value is YAML; null unsets the key. A dot reaches into a nested value: `optimizer.params.lr=1e-4`.
    """
    result = dict(settings)
    for override in overrides:
        key, separator, text = override.partition("=")
        path = [part.strip().replace("-", "_") for part in key.split(".")]
        if not separator or not all(path):
            raise ConfigError(f"--set {override}: write key=value")
        _apply(result, path, parse_value(text) if text.strip() else "")
    return result


def _apply(settings: dict[str, Setting], path: list[str], value: object) -> None:
    name, *inner = path
    if not inner:
        if value is None:
            settings.pop(name, None)
        else:
            settings[name] = Setting(value, _ORIGIN)
        return
    outer = copy.deepcopy(settings[name].value) if name in settings else {}
    target = outer
    for part in inner[:-1]:
        if not isinstance(target, dict):
            break
        target = target.setdefault(part, {})
    if not isinstance(target, dict):
        raise ConfigError(f"--set {'.'.join(path)}: {name} has no nested values to set")
    if value is None:
        target.pop(inner[-1], None)
    else:
        target[inner[-1]] = value
    settings[name] = Setting(outer, _ORIGIN)
