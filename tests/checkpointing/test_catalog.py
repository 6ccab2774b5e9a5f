import pytest

from megatron.checkpointing import Retention, find_latest, save_iterations, saved_iterations
from megatron.errors import ConfigError
from tests.checkpointing.runs import save_alone


def test_retention_keeps_the_newest(tmp_path):
    for iteration in range(1, 12):
        save_alone(tmp_path, iteration, retention=Retention(keep_last=2, always_keep=[3, 4]))
    assert saved_iterations(tmp_path) == [3, 4, 10, 11]


def test_retention_never_takes_the_latest(tmp_path):
    for iteration in (10, 20, 30):
        save_alone(tmp_path, iteration)
    save_alone(tmp_path, 5, retention=Retention(keep_last=2))
    assert saved_iterations(tmp_path) == [5, 20, 30]
    assert find_latest(tmp_path).name == "global_step5"


def test_retention_leaves_what_is_not_ours(tmp_path):
    foreign = tmp_path / "global_step1"
    foreign.mkdir()
    (foreign / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (tmp_path / "global_step_notes").mkdir()
    for iteration in (2, 3):
        save_alone(tmp_path, iteration, retention=Retention(keep_last=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step1",
        "global_step3",
        "global_step_notes",
        "latest",
    ]


@pytest.mark.parametrize(
    ("factor", "scale", "extra", "expected"),
    [
        (3, "linear", None, {3, 6, 9, 10}),
        (3.0, "linear", [1, 9, 11], {1, 3, 6, 9, 10}),
        (2, "log", None, {1, 2, 4, 8, 10}),
        (1.5, "log", None, {1, 2, 3, 5, 7, 10}),
        (None, "linear", [4], {4, 10}),
        (100, "linear", None, {10}),
    ],
)
def test_save_iterations(factor, scale, extra, expected):
    due = save_iterations(10, checkpoint_factor=factor, checkpoint_scale=scale, extra_save_iters=extra)
    assert due == expected


@pytest.mark.parametrize(
    ("factor", "scale"), [(2.5, "linear"), (0, "linear"), (-1, "linear"), (1, "log"), (0.5, "log"), (2, "cubic")]
)
def test_impossible_schedules(factor, scale):
    with pytest.raises(ConfigError, match="checkpoint_"):
        save_iterations(10, checkpoint_factor=factor, checkpoint_scale=scale)
