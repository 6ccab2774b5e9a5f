"""docs/contract.md and the tests: every line of the contract has tests, and the page names them all and no others."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINES = range(1, 39)


def _tests():
    """Names of all tests."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return {name for path in files for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)}


def _lines_of(test):
    """The lines that a test's name says it holds: `test_contract_01_04_and_25_...`; three digits are no line."""
    found = re.match(r"test_contract_(\d\d(?:_(?:and_)?\d\d(?!\d))*)_", test)
    return {int(number) for number in re.findall(r"\d\d", found[1])} if found else set()


def _rows():
    """The tests that the page names, by the first cell of their row."""
    rows = re.findall(r"^\| (.+?) \| (.*`test_.*) \|$", (ROOT / "docs" / "contract.md").read_text(), re.MULTILINE)
    return {first: set(re.findall(r"`(test_\w+)`", rest)) for first, rest in rows}


def test_every_line_of_the_contract_has_a_test():
    held = set().union(*map(_lines_of, _tests()))
    assert held == set(LINES)


def test_the_page_has_a_row_for_each_line_with_the_tests_of_its_number():
    tests, rows = _tests(), _rows()
    for line in LINES:
        assert rows[f"{line:02d}"] == {test for test in tests if line in _lines_of(test)}, line


def test_the_page_names_all_known_failures_and_only_tests_that_exist():
    tests, named = _tests(), set().union(*_rows().values())
    assert named <= tests, named - tests
    assert {test for test in tests if "public_failure" in test} <= named
    failures = {first for first in _rows() if not first.isdigit()}
    assert len(failures) == 7, "the failures on record"
