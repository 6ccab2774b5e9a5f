"""Plans: what goes into which bucket. Pure, no process."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.data_parallel.collective import all_reduce_bytes_sent
from megatron.data_parallel.partition import ReductionGroup, plan_buckets

DATA = ReductionGroup("data", 4, 4)
EXPERT = ReductionGroup("expert", 2, 4)


def _parameters(sizes, dtype=torch.float32):
    return {f"p{index}": torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for index, size in enumerate(sizes)}


def _names(plan):
    return [[slot.name for slot in bucket.slots] for bucket in plan.buckets]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 60))
def test_every_gradient_has_one_place_and_none_overlap(sizes, bucket_elements):
    parameters = _parameters(sizes)
    plan = plan_buckets(list(parameters), parameters, lambda _: DATA, bucket_elements=bucket_elements)
    assert sorted(name for bucket in _names(plan) for name in bucket) == sorted(parameters)
    for bucket in plan.buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end and slot.offset % 8 == 0
            end = slot.offset + slot.numel
        assert end <= bucket.num_elements


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 60))
def test_buckets_follow_the_ready_order(sizes, bucket_elements):
    parameters = _parameters(sizes)
    plan = plan_buckets(list(parameters), parameters, lambda _: DATA, bucket_elements=bucket_elements)
    assert [name for bucket in _names(plan) for name in bucket] == list(parameters)


def test_a_gradient_that_fills_a_bucket_and_the_last_one_travel_alone():
    parameters = _parameters([4, 4, 100, 4, 4, 4])
    plan = plan_buckets(list(parameters), parameters, lambda _: DATA, bucket_elements=50)
    assert _names(plan) == [["p0", "p1"], ["p2"], ["p3", "p4"], ["p5"]]


def test_groups_and_dtypes_never_share_a_bucket_and_launch_as_they_become_ready():
    parameters = {**_parameters([8, 8, 8, 8]), "half": torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))}
    order = ["p0", "p1", "half", "p2", "p3"]
    plan = plan_buckets(order, parameters, lambda name: EXPERT if name in ("p1", "p2") else DATA, bucket_elements=10**6)
    assert _names(plan) == [["p0"], ["half"], ["p1", "p2"], ["p3"]]
    assert [bucket.group.name for bucket in plan.buckets] == ["data", "data", "expert", "data"]


def test_contract_35_lines_tell_plans_apart():
    parameters = _parameters([8, 8, 8])
    plans = [
        plan_buckets(["p0", "p1", "p2"], parameters, lambda _: DATA, bucket_elements=10),
        plan_buckets(["p1", "p0", "p2"], parameters, lambda _: DATA, bucket_elements=10),
        plan_buckets(["p0", "p1", "p2"], parameters, lambda _: DATA, bucket_elements=5),
        plan_buckets(["p0", "p1", "p2"], parameters, lambda _: EXPERT, bucket_elements=10),
    ]
    again = plan_buckets(["p0", "p1", "p2"], _parameters([8, 8, 8]), lambda _: DATA, bucket_elements=10)
    assert len({tuple(plan.lines()) for plan in plans}) == 4
    assert again.lines() == plans[0].lines()


def test_the_factors_of_an_average_multiply_to_one_over_the_divisor():
    for arithmetic in (
        ReductionArithmetic(),
        ReductionArithmetic(prescale=False),
        ReductionArithmetic(prescale=False, predivide_factor=8.0),
        ReductionArithmetic(average_in_collective=True),
    ):
        for group in (DATA, EXPERT, ReductionGroup("one", 1, 1)):
            before, after = arithmetic.factors(group, backend_averages=True)
            in_backend = 1 / group.size if arithmetic.average_in_collective and group.size > 1 else 1.0
            assert before * in_backend * after * group.divisor == 1.0


def test_bytes_of_a_ring_all_reduce():
    assert all_reduce_bytes_sent(1000, 2) == 1000
    assert all_reduce_bytes_sent(1000, 4) == 1500
    assert all_reduce_bytes_sent(1000, 1) == 0
