"""Directories that cannot be written to are found before anything else is done."""

import pytest

from megatron.errors import ConfigError
from megatron.training.directories import check_writable


def test_directories_are_made_and_nothing_is_left_in_them(tmp_path):
    check_writable({"save": str(tmp_path / "a" / "b"), "log_dir": None})
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("blocked", ["a file", "a file/below"])
def test_one_that_cannot_be_made_is_refused_with_its_argument(tmp_path, blocked):
    (tmp_path / "a file").write_text("")
    with pytest.raises(ConfigError, match=r"tensorboard_dir .*a file"):
        check_writable({"tensorboard_dir": str(tmp_path / blocked)})
