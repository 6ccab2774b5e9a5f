import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.blend import BlendedDataset, make_blend, weights_by_num_documents
from megatron.errors import ConfigError

weights_strategy = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.sampled_from([1, 2, 0.1, 0.3, 1e-6])), min_size=1, max_size=20
).filter(any)


def blend_of(weights, num_samples):
    return make_blend(weights, num_samples, [f"set{i}" for i in range(len(weights))])


@settings(deadline=None)
@given(weights_strategy, st.integers(1, 300))
def test_every_prefix_holds_every_share_and_places_count_up(weights, num_samples):
    blend = blend_of(weights, num_samples)
    regular = num_samples - len(blend.late)
    seen = np.zeros(len(weights), int)
    for sample in range(regular):
        source, place = blend.locate(sample)
        assert place == seen[source]
        seen[source] += 1
        assert np.abs(seen - (sample + 1) * np.array(weights) / sum(weights)).max() < 2
    for sample in range(regular, num_samples):
        seen[blend.locate(sample)[0]] += 1
    assert seen.tolist() == blend.counts()


@settings(deadline=None)
@given(weights_strategy, st.integers(1, 300))
def test_no_positive_source_goes_without_and_no_zero_one_takes_part(weights, num_samples):
    counts = blend_of(weights, num_samples).counts()
    assert sum(counts) == num_samples
    for weight, count in zip(weights, counts, strict=True):
        if not weight:
            assert count == 0
        elif num_samples >= np.count_nonzero(weights):
            assert count >= 1


@pytest.mark.parametrize(
    ("weights", "num_samples", "expected"),
    [
        ([0.5, 0.5], 1000, [500, 500]),
        ([1e-6, 1], 1000, [1, 999]),
        ([0, 1], 1000, [0, 1000]),
        ([3, 1], 1000, [750, 250]),
        ([0.3, 0.7], 10, [3, 7]),
        ([1, 1, 1], 7, [3, 2, 2]),
        ([1e-9, 1e-9, 1], 4, [1, 1, 2]),
        ([2], 5, [5]),
    ],
)
def test_realised_shares(weights, num_samples, expected):
    assert blend_of(weights, num_samples).counts() == expected


def test_a_share_below_one_sample_is_warned_of(caplog):
    blend_of([1e-6, 1], 1000)
    assert "data set 'set0': weight 1e-06 of 1 is less than one of 1000 samples; it is given one" in caplog.text
    caplog.clear()
    assert sorted(blend_of([1, 1, 1], 2).counts()) == [0, 1, 1]
    assert "it gets none" in caplog.text


def test_proportions_not_sizes_of_weights_matter():
    order = [[blend_of(weights, 100).locate(i) for i in range(100)] for weights in ([0.3, 0.6, 0.1], [3, 6, 1])]
    assert order[0] == order[1]


def test_more_samples_do_not_change_the_first_ones():
    short, long = blend_of([0.31, 0.6, 0.09], 100), blend_of([0.31, 0.6, 0.09], 1000)
    assert [short.locate(i) for i in range(100)] == [long.locate(i) for i in range(100)]


@pytest.mark.parametrize("weights", [[1, -1], [float("nan"), 1], [float("inf"), 1]])
def test_impossible_weights_are_refused_by_name(weights):
    with pytest.raises(ConfigError, match="the weight of data set 'set"):
        blend_of(weights, 10)


def test_weights_must_fit_the_data_sets():
    with pytest.raises(ConfigError, match=r"all weights .* are zero"):
        blend_of([0, 0], 10)
    with pytest.raises(ConfigError, match=r"1 weights for 2 data sets \(a, b\)"):
        make_blend([1.0], 10, ["a", "b"])


def test_weights_by_num_documents():
    assert weights_by_num_documents([10, 30], 1.0) == pytest.approx([0.25, 0.75])
    assert weights_by_num_documents([10, 1000], 0.5) == pytest.approx([1 / 11, 10 / 11])
    assert weights_by_num_documents([10, 1000], 0.0) == pytest.approx([0.5, 0.5])
    assert weights_by_num_documents([10, 0], 0.0) == [1.0, 0.0]
    assert weights_by_num_documents([0, 0], 1.0) == [1.0, 1.0]


def test_blended_dataset_reads_each_source_in_order(caplog):
    caplog.set_level(logging.ERROR)
    sources = [[np.array([source, place]) for place in range(10)] for source in range(3)]
    blend = blend_of([2, 0, 1], 9)
    dataset = BlendedDataset([sources[0], None, sources[2]], blend)
    read = [dataset[i].tolist() for i in range(len(dataset))]
    assert [place for source, place in read if source == 0] == list(range(6))
    assert [place for source, place in read if source == 2] == list(range(3))
    for sample in (9, -1):
        with pytest.raises(IndexError):
            dataset[sample]
