"""Keys that no section declares: NeoX arguments that are refused or change nothing, and names nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from megatron.neox_arguments.known import HINTS, PARTLY_SUPPORTED, UNSUPPORTED
from megatron.neox_arguments.yaml_files import Setting
from megatron.neox_arguments.yaml_values import same_value, shown, wrong_kind

_NESTED = ("optimizer", "zero_optimization", "fp16", "bf16", "batch_size", "clip_grad")


def problem_of(key: str, setting: Setting, declared: Iterable[str]) -> str | None:
    """Return why a key is refused, or None where its value changes nothing or is NeoX's default.

    `declared` are the names of the sections, for suggestions in place of an unknown one.
    """
    what = f"{key}: {shown(setting.value)} ({setting.origin})"
    if key in HINTS:
        problem = None if setting.value is None else wrong_kind(setting.value, HINTS[key].kind)
        return problem and f"{what}: {problem}"
    if key in PARTLY_SUPPORTED:
        if setting.value is None or PARTLY_SUPPORTED[key].changes_nothing(setting.value):
            return None
        return f"{what}: known NeoX argument, this value is not supported here yet"
    if key in UNSUPPORTED:
        default, reason = UNSUPPORTED[key].default, UNSUPPORTED[key].reason
        if setting.value is None or same_value(setting.value, default):
            return None
        return f"{what}: known NeoX argument, not supported here yet; only {default!r} is accepted ({reason})"
    names = [*declared, *UNSUPPORTED, *HINTS, *PARTLY_SUPPORTED, *_NESTED]
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.6)
    return f"unknown key {shown(key)} ({setting.origin})" + (f"; did you mean {' or '.join(near)}?" if near else "")


def notice_of(key: str, setting: Setting) -> str | None:
    """Return the line that says that a value has no effect, or None where it asks for nothing."""
    known = HINTS.get(key) or PARTLY_SUPPORTED.get(key)
    if known is None or setting.value is None or same_value(setting.value, known.default):
        return None
    return f"{key}: {known.reason}"
