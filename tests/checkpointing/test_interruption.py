"""The world stops between, before or in the middle of any two changes to the disk."""

import contextlib
import errno
import shutil

import pytest
import torch

from megatron.checkpointing import (
    Retention,
    catalog,
    durable,
    load_checkpoint,
    open_checkpoint,
    save,
    saved_iterations,
)
from megatron.errors import CheckpointError
from tests.checkpointing.runs import ALONE, MODEL, blank, blank_state, optimizer_state, save_alone, snapshot, weights

CHANGES = ("write_file", "make_directory", "rename", "remove_tree")


class PowerLoss(BaseException):
    """Not an Exception: nothing in the code under test may run after it, as after a kill."""


def fail_at(monkeypatch, count, failure, moment):
    """Raise `failure` at change number `count` of the disk; returns the list of changes begun."""
    begun = []

    def wrap(name):
        change = getattr(durable, name)

        def wrapped(path, *arguments):
            begun.append((name, path.name))
            if len(begun) - 1 != count:
                return change(path, *arguments)
            if moment == "after":
                change(path, *arguments)
            elif moment == "middle" and name == "write_file":
                path.write_bytes(arguments[0][: len(arguments[0]) // 2])
            elif moment == "middle" and name == "remove_tree":
                next(file for file in sorted(path.iterdir()) if file.is_file()).unlink()
            raise failure

        return wrapped

    for name in CHANGES:
        monkeypatch.setattr(durable, name, wrap(name))
    return begun


def loaded_iteration(root):
    tensors, state = blank(weights()), blank_state(optimizer_state())
    loaded = load_checkpoint(root, weights=tensors, optimizer_state=state, model=MODEL)
    bias = "layers.1.dense.bias"
    assert torch.equal(tensors[bias], weights(loaded.run_state.iteration)[bias])
    assert torch.equal(state[bias]["exp_avg"], optimizer_state(loaded.run_state.iteration)[bias]["exp_avg"])
    return loaded.run_state.iteration


def interrupted_saves(tmp_path, monkeypatch, prepare, attempt, failure, moment):
    """Run `attempt` on a fresh `prepare`d root once for every change of the disk, failing there; yield the roots."""
    for count in range(200):
        root = tmp_path / f"stop{count}"
        prepare(root)
        with monkeypatch.context() as patch:
            begun = fail_at(patch, count, failure, moment)
            with contextlib.suppress(PowerLoss, CheckpointError):
                attempt(root)
            if len(begun) <= count:
                assert count >= 12, begun
                return
        yield root
        shutil.rmtree(root)


@pytest.mark.parametrize("moment", ["before", "middle", "after"])
def test_interrupted_save_leaves_a_checkpoint_that_loads(tmp_path, monkeypatch, moment):
    reached = set()
    for root in interrupted_saves(
        tmp_path,
        monkeypatch,
        lambda root: [save_alone(root, iteration) for iteration in (1, 2)],
        lambda root: save_alone(root, 3, retention=Retention(keep_last=1)),
        PowerLoss(),
        moment,
    ):
        reached.add(loaded_iteration(root))
        for iteration in saved_iterations(root):
            open_checkpoint(root / f"global_step{iteration}").verify()
        save_alone(root, 4, retention=Retention(keep_last=1))
        assert loaded_iteration(root) == 4
        assert sorted(path.name for path in root.iterdir()) == ["global_step4", "latest"]
    assert reached == {2, 3}


def test_first_save_interrupted(tmp_path, monkeypatch):
    for root in interrupted_saves(
        tmp_path, monkeypatch, lambda root: None, lambda root: save_alone(root, 1), PowerLoss(), "before"
    ):
        found = catalog.find_latest(root)
        assert found is None or loaded_iteration(root) == 1
        save_alone(root, 1)
        assert loaded_iteration(root) == 1
        shutil.rmtree(root / "global_step1")
        root.joinpath("latest").unlink()
        assert list(root.iterdir()) == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_saving_an_iteration_again(tmp_path, monkeypatch, moment):
    """The old and the new checkpoint have one name: there is always one of them behind it."""
    markers = set()
    for root in interrupted_saves(
        tmp_path,
        monkeypatch,
        lambda root: save_alone(root, 2, model={"marker": "old"}),
        lambda root: save_alone(root, 2, model={"marker": "new"}),
        PowerLoss(),
        moment,
    ):
        tensors = blank(weights())
        loaded = load_checkpoint(root, weights=tensors)
        markers.add("new" if '"new"' in (loaded.directory / "manifest.json").read_text() else "old")
        save_alone(root, 3)
        assert sorted(path.name for path in root.iterdir()) == ["global_step2", "global_step3", "latest"]
    assert markers == {"old", "new"}


def test_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device", "somewhere/layer_001.safetensors")
    for root in interrupted_saves(
        tmp_path, monkeypatch, lambda root: save_alone(root, 1), lambda root: save_alone(root, 2), full, "middle"
    ):
        assert loaded_iteration(root) in (1, 2)
    save_alone(tmp_path / "run", 1)
    fail_at(monkeypatch, 3, full, "middle")
    with pytest.raises(CheckpointError, match=r"could not save .*global_step2: No space left on device \(.*layer"):
        save_alone(tmp_path / "run", 2)


def test_failure_elsewhere_is_a_failure_here(tmp_path):
    save_alone(tmp_path, 1)
    answers = iter([True, False])
    with pytest.raises(CheckpointError, match="global_step2 was not saved: another rank failed"):
        save(tmp_path, snapshot(2), role=ALONE, agree=lambda ok: next(answers))
    assert loaded_iteration(tmp_path) == 1


def test_all_is_on_the_disk_before_a_name_shows_it(tmp_path, monkeypatch, synced):
    at_rename = {}
    rename = durable.rename
    monkeypatch.setattr(
        durable, "rename", lambda source, target: (at_rename.update({target.name: set(synced)}), rename(source, target))
    )
    directory = save_alone(tmp_path, 1)
    temporary = tmp_path / ".global_step1.tmp"
    expected = {str(temporary), *(str(temporary / path.name) for path in directory.iterdir())}
    assert expected <= at_rename["global_step1"]
    assert str(tmp_path) in at_rename["latest"]
    assert str(tmp_path / ".latest.tmp") in at_rename["latest"]
    assert synced[-1] == str(tmp_path)
