import json
from dataclasses import asdict, replace

import pytest

from megatron.monitor.jsonl import FILE_NAME, SUPERSEDED_FILE_NAME, JsonlSink
from megatron.monitor.record import ValidationRecord
from tests.monitor.examples import TRAINING, VALIDATION


def write(log_dir, iterations, *, start_iteration=0, loss=1.0):
    sink = JsonlSink(log_dir, start_iteration=start_iteration)
    for iteration in iterations:
        sink.training(replace(TRAINING, iteration=iteration, lm_loss=loss))
    sink.close()


def rows(log_dir, name=FILE_NAME):
    return [json.loads(line) for line in (log_dir / name).read_text().splitlines()]


def curve(log_dir, name=FILE_NAME):
    return [(row["iteration"], row["lm_loss"]) for row in rows(log_dir, name)]


def test_rows_are_the_records_and_on_disk_before_the_sink_is_closed(tmp_path):
    sink = JsonlSink(tmp_path / "new" / "folder", start_iteration=0)
    sink.training(TRAINING)
    sink.validation(VALIDATION)
    assert rows(tmp_path / "new" / "folder") == [asdict(TRAINING), asdict(VALIDATION)]
    sink.close()


def test_resuming_where_the_run_stopped_appends(tmp_path):
    write(tmp_path, [1, 2])
    before = (tmp_path / FILE_NAME).read_bytes()
    write(tmp_path, [3], start_iteration=2)
    assert (tmp_path / FILE_NAME).read_bytes().startswith(before)
    assert curve(tmp_path) == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert not (tmp_path / SUPERSEDED_FILE_NAME).exists()


def test_resuming_from_an_earlier_iteration_leaves_one_curve_and_loses_nothing(tmp_path):
    write(tmp_path, [1, 2, 3, 4])
    sink = JsonlSink(tmp_path, start_iteration=2)
    sink.validation(ValidationRecord.of_loss(2, "valid", 1.5))
    sink.training(replace(TRAINING, iteration=3, lm_loss=2.0))
    sink.close()
    assert curve(tmp_path) == [(1, 1.0), (2, 1.0), (2, 1.5), (3, 2.0)]
    assert curve(tmp_path, SUPERSEDED_FILE_NAME) == [(3, 1.0), (4, 1.0)]

    write(tmp_path, [2], start_iteration=1, loss=3.0)
    assert curve(tmp_path) == [(1, 1.0), (2, 3.0)]
    assert len(rows(tmp_path, SUPERSEDED_FILE_NAME)) == 2 + 3


def test_a_fresh_run_in_a_used_folder_starts_a_fresh_file(tmp_path):
    sink = JsonlSink(tmp_path, start_iteration=0)
    sink.validation(ValidationRecord.of_loss(0, "valid", 9.0))
    sink.close()
    write(tmp_path, [1, 2], loss=1.0)
    write(tmp_path, [1], loss=2.0)
    assert curve(tmp_path) == [(1, 2.0)]
    assert curve(tmp_path, SUPERSEDED_FILE_NAME) == [(0, 9.0), (1, 1.0), (2, 1.0)]


@pytest.mark.parametrize("torn", ['{"iteration": 3, "lm_lo', '{"iteration": 2', "\x00\x00", "3", "[1]"])
def test_a_last_line_torn_by_a_kill_is_set_aside(tmp_path, torn):
    write(tmp_path, [1, 2])
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write(torn)
    write(tmp_path, [3], start_iteration=2)
    assert [iteration for iteration, _ in curve(tmp_path)] == [1, 2, 3]
    assert (tmp_path / SUPERSEDED_FILE_NAME).read_text() == torn + "\n"


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    write(tmp_path, [1, 2])
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text().rstrip("\n"))
    write(tmp_path, [3], start_iteration=2)
    assert [iteration for iteration, _ in curve(tmp_path)] == [1, 2, 3]
