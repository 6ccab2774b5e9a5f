from collections import Counter

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron.errors import ConfigError
from megatron.text_generation import Sampling
from megatron.text_generation.sampling import filtered_logits, keep_top_k, keep_top_p, next_tokens, sample_generator


def logits(rows=4, size=50, seed=0):
    return 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("top_k", [1, 2, 7, 50])
def test_top_k_as_transformers(top_k):
    assert torch.equal(keep_top_k(logits(), top_k), TopKLogitsWarper(top_k)(None, logits()))


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_as_transformers(top_p):
    for seed in range(20):
        scores = logits(seed=seed)
        assert torch.equal(keep_top_p(scores, top_p), TopPLogitsWarper(top_p)(None, scores))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 10, 0.8), (1.5, 3, 0.95), (1.0, 40, 0.3), (3.0, 5, 0.8)]
)
def test_all_together_as_transformers(temperature, top_k, top_p):
    scores = logits()
    for warper in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)):
        scores = warper(None, scores)
    assert torch.equal(filtered_logits(logits(), Sampling(temperature, top_k, top_p)), scores)


@pytest.mark.parametrize("off", [Sampling(1.0, 0, 0.0), Sampling(1.0, 50, 1.0), Sampling(1.0, 500, 0.0)])
def test_zero_and_everything_mean_off(off):
    assert torch.equal(filtered_logits(logits(), off), logits())


def test_top_p_reaches_the_asked_probability_with_the_fewest_tokens():
    scores = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, kept in ((0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3)):
        assert torch.isfinite(keep_top_p(scores, top_p)).sum() == kept


def generators(count):
    return [sample_generator(0, sample) for sample in range(count)]


def test_temperature_zero_is_greedy_whatever_the_filters():
    for sampling in (Sampling(), Sampling(0.0, 5, 0.3)):
        assert next_tokens(logits(), sampling, generators(4)) == logits().argmax(-1).tolist()


def test_drawn_frequencies_follow_the_distribution():
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    counts = Counter()
    generator = sample_generator(3, 0)
    for _ in range(3000):
        counts.update(next_tokens(probabilities.log()[None], Sampling(1.0), [generator]))
    for token, probability in enumerate(probabilities.tolist()):
        # Five standard deviations of a binomial count.
        assert abs(counts[token] - 3000 * probability) < 5 * (3000 * probability * (1 - probability)) ** 0.5


def test_a_row_does_not_depend_on_its_batch():
    sampling = Sampling(1.0, 0, 0.9)
    together = next_tokens(logits(), sampling, generators(4))
    alone = [next_tokens(logits()[row : row + 1], sampling, [sample_generator(0, row)])[0] for row in range(4)]
    assert together == alone


def test_samples_and_seeds_differ():
    generators = [sample_generator(seed, sample) for seed in (0, 1) for sample in (0, 1)]
    assert len({tuple(torch.rand(4, generator=generator).tolist()) for generator in generators}) == 4


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 1.5}, {"top_p": -0.1}])
def test_impossible_values_are_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)
