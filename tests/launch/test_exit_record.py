"""exit.json, and the status of a run from what its workers left."""

import signal

import pytest

from megatron.errors import DataError
from megatron.launch.exit_record import (
    ExitRecord,
    failures_recorded,
    read_exit_record,
    remove_exit_record,
    settle_exit_record,
    write_exit_record,
)
from megatron.launch.exit_status import shell_status, status_of_run

DONE = ExitRecord(0, "reached train_iters", 6, None)


def test_a_record_comes_back_and_leaves_nothing_beside_it(tmp_path):
    write_exit_record(tmp_path / "new" / "logs", DONE)
    assert read_exit_record(tmp_path / "new" / "logs") == DONE
    assert [path.name for path in (tmp_path / "new" / "logs").iterdir()] == ["exit.json"]


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3", '{"code": 0}', '{"other": 1}'])
def test_what_is_no_record_is_none(tmp_path, text):
    if text is not None:
        (tmp_path / "exit.json").write_text(text)
    assert read_exit_record(tmp_path) is None


@pytest.mark.parametrize(
    ("error", "record"),
    [
        (DataError("torn tape"), ExitRecord(2, "torn tape", None, None)),
        (RuntimeError("boom"), ExitRecord(1, "RuntimeError: boom", None, None)),
        (KeyboardInterrupt(), ExitRecord(130, "interrupted", None, "SIGINT")),
    ],
)
def test_an_error_on_rank_0_is_recorded_and_raised(tmp_path, error, record):
    with pytest.raises(type(error)), failures_recorded(tmp_path, 0):
        raise error
    assert read_exit_record(tmp_path) == record


def test_other_ranks_record_nothing(tmp_path):
    with pytest.raises(RuntimeError), failures_recorded(tmp_path, 1):
        raise RuntimeError
    assert read_exit_record(tmp_path) is None


def test_an_earlier_runs_record_does_not_speak_for_this_one(tmp_path):
    write_exit_record(tmp_path, DONE)
    with failures_recorded(tmp_path, 0):
        assert read_exit_record(tmp_path) is None
    write_exit_record(tmp_path, DONE)
    remove_exit_record(tmp_path)
    assert read_exit_record(tmp_path) is None


def test_an_unwritable_folder_does_not_hide_the_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="torn tape"), failures_recorded(tmp_path / "file" / "logs", 0):
        raise DataError("torn tape")
    settle_exit_record(tmp_path / "file" / "logs", 1)


def test_the_record_is_made_to_agree_with_the_run(tmp_path):
    settle_exit_record(tmp_path, 137)
    assert read_exit_record(tmp_path) == ExitRecord(137, "a worker was ended by SIGKILL", None, "SIGKILL")
    write_exit_record(tmp_path, DONE)
    settle_exit_record(tmp_path, 0)
    assert read_exit_record(tmp_path) == DONE
    settle_exit_record(tmp_path, 1)
    assert read_exit_record(tmp_path) == ExitRecord(1, "a worker failed; rank 0 said: reached train_iters", 6, None)


@pytest.mark.parametrize(
    ("left", "launcher", "received", "status"),
    [
        ([0, 0], 0, None, 0),
        ([0], 0, None, 1),  # one left nothing: it died, whatever the launcher says
        ([0], -9, None, 137),
        ([], 256 - 9, None, 137),
        ([], 1, None, 1),
        ([], 0, None, 1),  # nobody said that all is well
        ([75, 75], 75, None, 75),
        ([75], 75, None, 1),  # the other may not have saved
        ([75, 1], 75, None, 1),
        ([75, 0], 75, None, 75),
        ([2, 1], 1, None, 2),  # the other failed for want of this one
        ([2], 2, None, 2),
        ([], -15, signal.SIGTERM, 143),
        ([130, 130], 130, signal.SIGINT, 130),
        ([1], 1, signal.SIGINT, 1),  # failed while saving
        ([0, 0], 0, signal.SIGINT, 0),  # was done all the same
    ],
)
def test_status_of_a_run_of_two(tmp_path, left, launcher, received, status):
    for rank, of_worker in enumerate(left):
        (tmp_path / f"status_{rank}").write_text(str(of_worker))
    (tmp_path / "said_0123").touch()
    assert status_of_run(tmp_path, 2, launcher, received) == status


@pytest.mark.parametrize(("status", "shell"), [(0, 0), (1, 1), (75, 75), (130, 130), (-9, 137), (247, 137), (241, 143)])
def test_statuses_as_shells_give_them(status, shell):
    assert shell_status(status) == shell
