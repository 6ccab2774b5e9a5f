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

# Whole words of a key; `maximum_tokens` is none.
_SECRET = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|token|passwd|password|secret|credentials?)$", re.IGNORECASE
)

# Linux refuses to start a process with a longer argument.
_LONGEST_ARGUMENT_BYTES = 128 * 1024 - 1


def pack(flat: Mapping[str, Any]) -> str:
    """Return the argument that carries `flat`. Command lines are public on a host, so secrets are refused.

    Raises ConfigError naming a key that looks like one, or the sizes when the configuration is too long.
    """
    for key in _keys(flat):
        if _SECRET.search(key.replace("-", "_")):
            raise ConfigError(f"{key} looks like a secret: process lists are public, so set it in the environment")
    # default: a date in a YAML file is text to us, as it was to the user
    text = json.dumps(flat, separators=(",", ":"), default=str)
    argument = f"{OPTION}={base64.urlsafe_b64encode(text.encode()).decode()}"
    if len(argument) > _LONGEST_ARGUMENT_BYTES:
        longest = max(flat, key=lambda key: len(json.dumps(flat[key], default=str)))
        raise ConfigError(
            f"the configuration takes {len(argument)} bytes on the command line of a worker, and the system allows "
            f"{_LONGEST_ARGUMENT_BYTES}; {longest} is the longest value: shorten it, or start train.py with torchrun, "
            "which reads the files itself"
        )
    return argument


def unpack(payload: str) -> dict[str, Any]:
    """Return what `pack` was given, from the part behind the `=`. Raises ConfigError for anything else."""
    try:
        flat = json.loads(base64.b64decode(payload.encode(), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"{OPTION} does not hold a configuration: {error}") from error
    if not isinstance(flat, dict):
        raise ConfigError(f"{OPTION} does not hold a configuration")
    return flat


def _keys(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [name for key, inner in value.items() for name in (str(key), *_keys(inner))]
    if isinstance(value, list):
        return [name for inner in value for name in _keys(inner)]
    return []
