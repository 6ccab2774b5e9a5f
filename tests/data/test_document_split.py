import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.document_split import parse_split, split_boundaries
from megatron.errors import ConfigError

SPLITS = ["969, 30, 1", "949,50,1", "1,1,1", "100,0,0", "100", "0.5,0.5", "0,1,0", "1,0,1e-9", "1e-9,1,1"]


def counts(num_documents, split):
    bounds = split_boundaries(num_documents, split)
    assert bounds[0] == 0
    assert bounds[3] == num_documents
    return [end - start for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("num_documents", [0, 1, 2, 3, 7, 10, 1000, 10**9])
def test_boundaries_are_monotone_exact_and_fair(num_documents, split):
    result, shares = counts(num_documents, split), parse_split(split)
    assert min(result) >= 0
    assert sum(result) == num_documents
    wanted = [i for i in range(3) if shares[i]]
    assert all(result[i] == 0 for i in range(3) if i not in wanted)
    if num_documents >= len(wanted):
        assert all(result[i] >= 1 for i in wanted)
    else:
        assert result == [1 if i in wanted[:num_documents] else 0 for i in range(3)]
    for got, share in zip(result, shares, strict=True):
        assert abs(got - share * num_documents) <= 3


@given(st.integers(0, 10**6), st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any))
def test_any_split_is_exact(num_documents, shares):
    result = counts(num_documents, ",".join(map(str, shares)))
    assert min(result) >= 0
    for got, share in zip(result, shares, strict=False):
        assert abs(got - Fraction(share * num_documents, sum(shares))) <= 2
        assert got or not share or num_documents < 3


@pytest.mark.parametrize(
    ("num_documents", "split", "expected"),
    [
        (1000, "969, 30, 1", [969, 30, 1]),
        (10, "969, 30, 1", [8, 1, 1]),
        (3, "969, 30, 1", [1, 1, 1]),
        (2, "969, 30, 1", [1, 1, 0]),
        (1, "969, 30, 1", [1, 0, 0]),
        (7, "0.5,0.5", [4, 3, 0]),
        (7, "1,1,1", [2, 3, 2]),
        (10, "100,0,0", [10, 0, 0]),
        (1, "0,1,1", [0, 1, 0]),
        (10**6, "1,1,1", [333333, 333334, 333333]),
    ],
)
def test_examples(num_documents, split, expected):
    assert counts(num_documents, split) == expected


@pytest.mark.parametrize("split", ["", "a,b", "1,-1,1", "0,0,0", "1,1,1,1", "nan,1", "inf", "1;2", "1/0"])
def test_nonsense_is_refused_by_name(split):
    with pytest.raises(ConfigError, match=f"split '{split}'"):
        parse_split(split)
