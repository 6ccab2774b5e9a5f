"""YAML files to flat keys: merged left to right, each value with the place it came from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import ConfigError
from megatron.neox_arguments.yaml_values import same_value, shown


@dataclass(frozen=True)
class Setting:
    """A value and where it was set: `file:line`, `--set`, or what derived it."""

    value: Any
    origin: str
    parts: Mapping[str, str] = field(default_factory=dict)
    """Where the nested values were set, by their path without the key itself: `params.lr`."""

    def place(self, path: str) -> str:
        """Return where a nested value was set."""
        return self.parts.get(path, self.origin)


class _Loader(yaml.SafeLoader):
    """YAML as NeoX users write it: `6e-4` is a number, and JSON with comments and trailing commas is fine."""


_INT, _TIMESTAMP = "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"
# YAML 1.1 reads 1:30 as 90, 010 as 8 and 2026-01-01 as a date. No argument is any of these: they stay text, as in
# YAML 1.2, and are refused by name where a number is wanted.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
# What PyYAML raises for text that is no value: `!!int x`, an alias inside of itself, ten thousand `[`.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def read_files(paths: Sequence[str | Path], conf_dir: str | Path | None = None) -> dict[str, Setting]:
    """Return the settings of all files together, keys with `_` for `-`.

    A name without an ending means that name with `.yml`. Raises ConfigError for a file that is missing or is not a YAML
    mapping, and for a key that is set to different values in two places.
    """
    settings: dict[str, Setting] = {}
    for path in paths:
        for key, setting in _read_file(_locate(path, conf_dir)):
            earlier = settings.get(key)
            if earlier is not None and not same_value(earlier.value, setting.value):
                raise ConfigError(
                    f"{key} is set twice: to {shown(earlier.value)} in {earlier.origin} and to "
                    f"{shown(setting.value)} in {setting.origin}"
                )
            settings.setdefault(key, setting)
    return settings


def parse_value(text: str) -> Any:
    """Read one YAML value, as on the right of `--set key=`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _construct("--set", loader, node)
    except (RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{shown(text)} is not a YAML value: {_one_line(error)}") from error


def _locate(path: str | Path, conf_dir: str | Path | None) -> Path:
    candidates = [Path(path)] if Path(path).suffix in (".yml", ".yaml") else [Path(path), Path(f"{path}.yml")]
    if conf_dir is not None:
        candidates = [Path(conf_dir) / candidate for candidate in candidates] + candidates
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(f"configuration file {path} not found (looked for {', '.join(map(str, candidates))})")


def _read_file(path: Path) -> list[tuple[str, Setting]]:
    try:
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text)
        node = loader.get_single_node()
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {_one_line(error)}") from error
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} is not a mapping of keys to values")
    try:
        return [
            (
                _key(path, loader, key),
                Setting(
                    _construct(path, loader, value), f"{path}:{key.start_mark.line + 1}", dict(_parts(path, value))
                ),
            )
            for key, value in node.value
        ]
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} cannot be read as YAML: {_one_line(error)}") from error


def _construct(path: Path | str, loader: _Loader, node: yaml.Node) -> Any:
    try:
        _refuse_repeated_keys(path, loader, node)
        return loader.construct_object(node, deep=True)
    except _UNREADABLE as error:
        raise ConfigError(f"{path}:{node.start_mark.line + 1} has a value that cannot be read: {error}") from error


def _key(path: Path, loader: _Loader, node: yaml.Node) -> str:
    key = _construct(path, loader, node)
    if not isinstance(key, str):
        raise ConfigError(f"{path}:{node.start_mark.line + 1} has the key {key!r}, which is not a name")
    return key.replace("-", "_")


def _parts(path: Path, node: yaml.Node, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}".replace("-", "_")
            yield name, f"{path}:{key.start_mark.line + 1}"
            yield from _parts(path, value, f"{name}.")


def _refuse_repeated_keys(path: Path | str, loader: _Loader, node: yaml.Node) -> None:
    """Nested mappings: a key given twice would silently take its last value."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(path, loader, item)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, tuple[int, str]] = {}
    for key, value in node.value:
        name, content = str(key.value).replace("-", "_"), yaml.serialize(value)
        line = key.start_mark.line + 1
        if name in lines and lines[name][1] != content:
            raise ConfigError(f"{name} is set twice to different values: in {path}:{lines[name][0]} and {path}:{line}")
        lines[name] = (line, content)
        _refuse_repeated_keys(path, loader, value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
