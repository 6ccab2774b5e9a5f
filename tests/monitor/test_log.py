import logging
import re
import sys
import warnings

import pytest

from megatron.monitor.log import setup_logging

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.fixture(autouse=True)
def restored_logging():
    names = (None, "megatron", "py.warnings", "DeepSpeed")
    before = {
        n: (logging.getLogger(n).level, logging.getLogger(n).handlers[:], logging.getLogger(n).propagate) for n in names
    }
    yield
    logging.captureWarnings(False)
    for name, (level, handlers, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate


def test_rank_0_informs_on_stdout_and_warns_on_stderr(capsys):
    setup_logging(0)
    logging.getLogger("megatron.training.loop").info("step %d", 3)
    logging.getLogger("megatron.training.loop").debug("detail")
    logging.getLogger("megatron.data").warning("slow disk")
    out, err = capsys.readouterr()
    assert re.fullmatch(STAMP + r" INFO step 3\n", out)
    assert re.fullmatch(STAMP + r" WARNING slow disk\n", err)


def test_other_ranks_only_warn_and_say_who_they_are(capsys):
    setup_logging(3)
    logging.getLogger("megatron.training.loop").info("step 3")
    logging.getLogger("megatron.training.loop").error("lost")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(STAMP + r" rank 3 ERROR lost\n", err)


def test_libraries_are_heard_from_warnings_on(capsys):
    setup_logging(0)
    logging.getLogger("some.library").info("hello")
    logging.getLogger("some.library").warning("careful")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("WARNING careful\n")


def test_deepspeed_speaks_in_our_format_once(capsys):
    deepspeed = logging.getLogger("DeepSpeed")
    deepspeed.propagate = False
    deepspeed.setLevel(logging.INFO)
    deepspeed.addHandler(logging.StreamHandler(sys.stdout))
    setup_logging(0)
    deepspeed.info("chatter")
    deepspeed.warning("careful")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(STAMP + r" WARNING careful\n", err)


@pytest.mark.parametrize(("rank", "num_warnings"), [(0, 1), (1, 0)])
def test_a_python_warning_all_ranks_share_is_shown_once(capsys, rank, num_warnings):
    setup_logging(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old option", UserWarning, stacklevel=1)
    assert capsys.readouterr().err.count("UserWarning: old option") == num_warnings


def test_calling_it_again_replaces_the_settings(capsys, tmp_path):
    setup_logging(0, log_dir=tmp_path)
    setup_logging(0)
    logging.getLogger("megatron").info("once")
    assert capsys.readouterr().out.count("once") == 1
    assert not list(tmp_path.glob("log/*"))


def test_each_rank_has_a_file_once_it_has_something_to_say(tmp_path, capsys):
    setup_logging(2, log_dir=tmp_path)
    logging.getLogger("megatron").info("quiet")
    path = tmp_path / "log" / "rank_2.log"
    assert not path.exists()
    logging.getLogger("megatron").warning("odd")
    assert path.read_text() == capsys.readouterr().err
    assert path.read_text().endswith(" rank 2 WARNING odd\n")
