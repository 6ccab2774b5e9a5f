"""Values as YAML gives them: compared, shown in messages, and checked against the type NeoX gives an argument."""

from __future__ import annotations

from typing import Any, Literal

Kind = Literal["bool", "int", "float", "str", "list", "dict"]

_WORDS: dict[str, str] = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "nested keys and values",
}
_LONGEST_SHOWN = 120


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are the same; unlike for `==`, true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def shown(value: Any) -> str:
    """Return a value for a message, cut where it would drown the message."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def wrong_kind(value: Any, kind: Kind) -> str | None:
    """Return what was expected instead of `value`, or None when it is of that kind. An int is a float, 1e3 an int."""
    if kind == "bool":
        fits = isinstance(value, bool)
    elif kind in ("int", "float"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = is_number and (kind == "float" or value == value // 1)
    else:
        fits = isinstance(value, {"str": str, "list": list, "dict": dict}[kind])
    return None if fits else f"should be {_WORDS[kind]}"
