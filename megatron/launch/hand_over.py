"""The configuration's way from deepy to its workers: base64 of JSON, as one command-line argument."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any

from megatron.errors import ConfigError

OPTION = "--megatron_config"

_SECRET = re.compile(r"(api_?key|token|password|secret|credential)s?$", re.IGNORECASE)


def pack(flat: Mapping[str, Any]) -> str:
    """Return the argument that carries `flat`. Command lines are public on a host, so secrets are refused.

    Raises ConfigError naming a key that looks like one.
    """
    for key in _keys(flat):
        if _SECRET.search(key):
            raise ConfigError(f"{key} looks like a secret: process lists are public, so set it in the environment")
    text = json.dumps(flat, separators=(",", ":"))
    return f"{OPTION}={base64.urlsafe_b64encode(text.encode()).decode()}"


def unpack(payload: str) -> dict[str, Any]:
    """Return what `pack` was given, from the part behind the `=`. Raises ConfigError for anything else."""
    try:
        flat = json.loads(base64.urlsafe_b64decode(payload.encode()))
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"{OPTION} does not hold a configuration: {error}") from error
    if not isinstance(flat, dict):
        raise ConfigError(f"{OPTION} does not hold a configuration")
    return flat


def _keys(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [name for key, inner in value.items() for name in (str(key), *_keys(inner))]
    return []
