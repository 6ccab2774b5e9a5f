"""No argument is declared and forgotten: each is read somewhere outside the file that declares it."""

import re
from pathlib import Path

import pytest

from megatron.neox_arguments.arguments import _SECTION_OF, _SECTIONS

ROOT = Path(__file__).resolve().parents[2]


def _sources():
    files = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").rglob("*.py"), *ROOT.glob("*.py")]
    declaring = {Path(__import__(section.__module__, fromlist=["x"]).__file__) for section in _SECTIONS.values()}
    return "\n".join(path.read_text() for path in files if path not in declaring)


@pytest.mark.parametrize("name", sorted(_SECTION_OF))
def test_field_is_read(name, sources=_sources()):  # noqa: B008 - read once
    assert re.search(rf"\.{name}\b", sources), f"nothing reads {name}"
