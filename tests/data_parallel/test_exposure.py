"""What was in flight and what was waited for, from marks set by hand. Pure, no process, no clock."""

import pytest

from megatron.data_parallel.exposure import CollectiveTimes, CommunicationTimes, HostMark, summarise


def _bucket(index, launched, landed, blocked):
    return CollectiveTimes(
        index,
        "all_reduce",
        bytes_sent=100,
        launched=HostMark(launched),
        landed=HostMark(landed),
        blocked=[(HostMark(start), HostMark(end)) for start, end in blocked],
    )


def test_two_collectives_in_flight_at_once_count_once_and_blocked_spans_add_up():
    buckets = [
        _bucket(0, 10.0, 14.0, [(10.0, 10.5), (20.0, 20.0)]),
        _bucket(1, 12.0, 16.0, [(12.0, 12.25)]),
        _bucket(2, 18.0, 21.0, [(18.0, 18.25), (20.0, 21.0)]),
    ]
    assert summarise(buckets) == CommunicationTimes(in_flight_s=9.0, exposed_s=2.0, bytes_sent=300)


def test_without_collectives_there_is_nothing():
    assert summarise([]) == CommunicationTimes(0.0, 0.0, 0)


def test_a_landing_nobody_noted_is_no_later_than_the_end_of_the_wait():
    noted, missed = HostMark(3.0), HostMark()
    for landing in (noted, missed):
        landing.no_later_than(HostMark(5.0))
    assert (noted.at_s, missed.at_s) == (3.0, 5.0)
    assert missed.seconds_since(noted) == pytest.approx(2.0)
