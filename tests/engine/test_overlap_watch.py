"""The warning that nothing was hidden, with its likely reason; from marks set by hand, no process."""

import logging

import pytest

from megatron.data_parallel.exposure import CollectiveTimes, HostMark
from megatron.engine.overlap_watch import NUM_STEPS, OverlapWatch
from megatron.engine.reduction_report import why_overlap_is_impossible
from megatron.engine.results import StepCommunication


def _step(*buckets, blocked_s, launch_s=0.0):
    """Buckets of the given bytes, in flight one after the other for a second each; the wait for the last is blocked."""
    times = [
        CollectiveTimes(
            index,
            "all_reduce",
            bytes_sent,
            launched=HostMark(float(index)),
            landed=HostMark(index + 1.0),
            blocked=[(HostMark(index + 0.0), HostMark(index + launch_s))],
        )
        for index, bytes_sent in enumerate(buckets)
    ]
    end = float(len(buckets))
    times[-1].blocked.append((HostMark(end - blocked_s), HostMark(end)))
    return StepCommunication(times)


def _warnings(caplog, steps):
    watch = OverlapWatch()
    with caplog.at_level(logging.WARNING):
        for step in steps:
            watch.add(step)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (_step(100, blocked_s=1.0), "one bucket"),
        (_step(10, 10, 80, blocked_s=3.0), "one of 3 buckets carries 80%"),
        (_step(10, 10, 10, blocked_s=1.0, launch_s=0.7), "raise ddp_bucket_size"),
        (_step(10, 10, 10, blocked_s=3.0), "link is too slow"),
    ],
)
def test_a_reduction_that_nothing_hides_is_said_once_with_its_likely_reason(caplog, step, reason):
    messages = _warnings(caplog, [step] * 60)
    assert len(messages) == 1 and reason in messages[0] and f"over {NUM_STEPS} steps" in messages[0]


def test_five_percent_hidden_is_enough_and_the_first_step_does_not_count(caplog):
    first, others = _step(10, 10, blocked_s=0.0), _step(10, 10, blocked_s=2.0)
    assert not _warnings(caplog, [_step(10, 10, blocked_s=2.0)] + [_step(10, 10, blocked_s=1.89)] * 60)
    assert not _warnings(caplog, [others] * (NUM_STEPS + 1))
    assert _warnings(caplog, [first] + [others] * 60)


def test_what_in_the_environment_keeps_an_accelerator_from_overlapping():
    one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in why_overlap_is_impossible("cuda", 1, one_queue)
    assert why_overlap_is_impossible("cuda", 2, one_queue) is None
    assert "CUDA_LAUNCH_BLOCKING=1" in why_overlap_is_impossible("cuda", 2, {"CUDA_LAUNCH_BLOCKING": "1"})
    assert why_overlap_is_impossible("cuda", 1, {}) is None
    assert why_overlap_is_impossible("cpu", 1, one_queue) is None
