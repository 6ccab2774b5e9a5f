import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.sample_index import build_sample_index, epochs_for_samples, samples_in_epochs
from tests.data import megatron_core

lengths_strategy = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any)
problems = {
    "lengths": lengths_strategy,
    "seq_length": st.integers(1, 20),
    "num_epochs": st.integers(1, 6),
    "seed": st.integers(0, 2**40),
}


def build(lengths, seq_length, num_epochs, seed):
    return build_sample_index(np.array(lengths), seq_length=seq_length, num_epochs=num_epochs, seed=seed)


def plain_samples(lengths, document_order, seq_length):
    """The samples as lists of (document position, offset), by walking the stream token by token."""
    stream = [(position, i) for position, document in enumerate(document_order) for i in range(lengths[document])]
    starts = range(0, len(stream) - seq_length, seq_length)
    return [stream[start : start + seq_length + 1] for start in starts]


@settings(deadline=None)
@given(**problems)
def test_samples_are_cut_as_by_walking_the_stream(lengths, seq_length, num_epochs, seed):
    index = build(lengths, seq_length, num_epochs, seed)
    expected = plain_samples(lengths, index.document_order, seq_length)
    assert index.num_samples == len(expected) == samples_in_epochs(num_epochs, sum(lengths), seq_length)
    starts = [sample[0] for sample in expected] + [sample[-1] for sample in expected[-1:]]
    if expected:
        assert index.sample_starts.tolist() == [list(start) for start in starts]


@settings(deadline=None)
@given(**problems)
def test_samples_are_cut_as_by_megatron_core(lengths, seq_length, num_epochs, seed):
    helpers = megatron_core.load("helpers")
    index = build(lengths, seq_length, num_epochs, seed)
    if not index.num_samples:
        return
    sizes, order = np.array(lengths, np.int32), index.document_order.astype(np.int32)
    theirs = helpers.build_sample_idx(sizes, order, seq_length, num_epochs, sum(lengths), True, True)
    # Empty documents in front: theirs starts at the first document, ours at the first token.
    theirs[0, 0] = index.sample_starts[0, 0] if not sizes[order[: index.sample_starts[0, 0]]].any() else -1
    assert index.sample_starts.tolist() == theirs.tolist()


@settings(deadline=None)
@given(**problems)
def test_every_epoch_is_a_permutation_and_samples_stay_in_theirs(lengths, seq_length, num_epochs, seed):
    index = build(lengths, seq_length, num_epochs, seed)
    for epoch in index.document_order.reshape(num_epochs, -1):
        assert sorted(epoch) == list(range(len(lengths)))
    start = 0
    for epoch in range(num_epochs):
        end = samples_in_epochs(epoch + 1, sum(lengths), seq_length)
        assert sorted(index.sample_order[start:end]) == list(range(start, end))
        start = end


@settings(deadline=None)
@given(**problems)
def test_more_epochs_do_not_change_the_first_ones(lengths, seq_length, num_epochs, seed):
    short, long = build(lengths, seq_length, num_epochs, seed), build(lengths, seq_length, num_epochs + 2, seed)
    for name in ("document_order", "sample_order"):
        assert np.array_equal(getattr(short, name), getattr(long, name)[: getattr(short, name).size])
    assert np.array_equal(short.sample_starts[:-1], long.sample_starts[: short.num_samples])


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 5000))
def test_epochs_are_just_enough(num_samples, num_tokens, seq_length):
    num_epochs = epochs_for_samples(num_samples, num_tokens, seq_length)
    assert samples_in_epochs(num_epochs, num_tokens, seq_length) >= num_samples
    assert num_epochs == 1 or samples_in_epochs(num_epochs - 1, num_tokens, seq_length) < num_samples


def test_order_depends_on_the_seed_and_on_nothing_else():
    lengths = [5] * 50
    first, again = build(lengths, 7, 2, 1234), build(lengths, 7, 2, 1234)
    for name in ("document_order", "sample_starts", "sample_order"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    for seed in (1235, 1234 + 2**32):
        assert not np.array_equal(first.document_order, build(lengths, 7, 2, seed).document_order)
        assert not np.array_equal(first.sample_order, build(lengths, 7, 2, seed).sample_order)


def test_order_is_that_of_every_numpy_version():
    # Written down once: numpy promises that RandomState never changes. A checkpoint's data position relies on it.
    index = build([3] * 8, 4, 1, 1234)
    assert index.document_order.tolist() == [6, 0, 5, 4, 3, 7, 1, 2]
    assert index.sample_order.tolist() == [3, 4, 2, 1, 0]


def test_documents_and_samples_are_shuffled_differently():
    index = build([8] * 100, 8, 1, 5)
    assert index.document_order[:90].tolist() != index.sample_order[:90].tolist()


@pytest.mark.parametrize("largest", [2**31 - 1, 2**31 + 10])
def test_offsets_outgrow_32_bits_where_a_document_does(largest):
    index = build([largest], 2**30, 1, 0)
    assert index.sample_starts[:, 1].tolist() == [0, 2**30] + ([2**31] if largest > 2**31 else [])
    assert index.sample_starts.dtype == (np.int64 if largest >= 2**31 else np.int32)
