import pytest
import torch

from megatron.text_generation import DecodeSettings, Sampling, generate_tokens
from megatron.text_generation.sampling import sample_generator
from tests.text_generation.decoders import EOD, MAX_LENGTH, VOCAB_SIZE, as_model, make_cache, reference_decoder

PROMPTS = [[5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6], [11, 12]]


def settings(**changes):
    values = {
        "sampling": Sampling(),
        "maximum_tokens": 12,
        "max_length": MAX_LENGTH,
        "eod": EOD,
        "vocab_size": VOCAB_SIZE,
    }
    return DecodeSettings(**(values | changes))


def run(model, prompts=PROMPTS, *, seed=0, cache=make_cache, **changes):
    generators = [sample_generator(seed, sample) for sample in range(len(prompts))]
    return generate_tokens(model, prompts, settings(**changes), generators=generators, make_cache=cache)


@pytest.fixture(scope="module")
def decoder():
    return reference_decoder()


def by_transformers(decoder, prompt, maximum_tokens=12):
    mask = torch.ones(1, len(prompt))
    row = decoder.generate(torch.tensor([prompt]), attention_mask=mask, max_new_tokens=maximum_tokens, do_sample=False)[
        0
    ]
    tokens = row[len(prompt) :].tolist()
    return tokens[: tokens.index(EOD)] if EOD in tokens else tokens


def test_greedy_is_what_transformers_generates(decoder):
    completions = run(as_model(decoder))
    assert [completion.tokens for completion in completions] == [by_transformers(decoder, prompt) for prompt in PROMPTS]
    assert all(completion.tokens for completion in completions)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0, 0.9), Sampling(0.8, 5)])
def test_cache_changes_nothing(decoder, sampling):
    assert run(as_model(decoder), sampling=sampling) == run(as_model(decoder), sampling=sampling, cache=None)


def test_cache_is_used(decoder):
    fed = []

    def model(tokens_BS, cache=None):
        fed.append(tokens_BS.shape[1])
        return as_model(decoder)(tokens_BS, cache)

    run(model, [[5, 6, 7], [5, 6, 7, 8]])
    assert fed[0] == 3
    assert set(fed[1:]) == {1}


def test_a_prompt_does_not_depend_on_its_batch(decoder):
    sampling = Sampling(1.0, 10, 0.95)
    together = run(as_model(decoder), sampling=sampling)
    for index, prompt in enumerate(PROMPTS):
        alone = generate_tokens(
            as_model(decoder),
            [prompt],
            settings(sampling=sampling),
            generators=[sample_generator(0, index)],
            make_cache=make_cache,
        )
        assert alone[0].tokens == together[index].tokens


def test_seed_decides(decoder):
    results = [run(as_model(decoder), seed=seed, sampling=Sampling(1.0)) for seed in (1, 1, 2)]
    assert results[0] == results[1]
    assert results[0] != results[2]


def counting(tokens_BS, cache=None):
    """Says the successor of the last token, then eod after 20; ids from 30 on are padding and always likeliest."""
    following_BS = torch.where(tokens_BS >= 20, EOD, tokens_BS + 1)
    logits_BSV = torch.nn.functional.one_hot(following_BS, VOCAB_SIZE).float()
    logits_BSV[..., 30:] = 5.0
    return logits_BSV


def count(prompts, **changes):
    return run(counting, prompts, cache=None, vocab_size=30, **changes)


def test_stops_at_eod_and_at_maximum_tokens():
    short, long, longer = count([[18], [2], [1, 1, 1, 3]])
    assert (short.tokens, short.finished) == ([19, 20], True)
    assert (long.tokens, long.finished) == ([*range(3, 15)], False)
    assert (longer.tokens, longer.finished) == ([*range(4, 16)], False)


def test_stops_at_the_length_of_the_model():
    completions = count([[1] * 9, [1] * 10, [1] * 11, [2]], max_length=10)
    assert [len(completion.tokens) for completion in completions] == [1, 0, 0, 9]


@pytest.mark.parametrize(
    ("prompts", "changes", "num_calls"),
    [
        ([[1], [2]], {"maximum_tokens": 0}, 0),
        ([[2], [1] * 12], {"maximum_tokens": 3, "max_length": 10}, 3),
        ([[18], [19]], {}, 3),
        ([[2], [1] * 5], {"maximum_tokens": 3}, 7),
    ],
)
def test_model_is_not_called_for_nothing(prompts, changes, num_calls):
    calls = []

    def model(tokens_BS, cache=None):
        calls.append(tokens_BS.shape)
        return counting(tokens_BS)

    run(model, prompts, cache=None, vocab_size=30, **changes)
    assert len(calls) == num_calls


def test_logits_on_request():
    completion, other = count([[18], [1]], return_logits=True, maximum_tokens=3)
    assert torch.stack(completion.logits).argmax(-1).tolist() == [*completion.tokens, EOD]
    assert torch.stack(other.logits).shape == (3, 30)


def test_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="eod"):
        count([[1], []])
