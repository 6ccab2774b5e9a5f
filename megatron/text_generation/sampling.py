"""From logits to the next token. Zero means off for every knob; a temperature of zero is greedy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. At `temperature` 0 the likeliest token is taken and `top_k` and `top_p` change nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature}: it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}: it must be 0 (off) or the number of tokens to choose from")
        if not 0 <= self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}: it must be 0 (off) or a probability up to 1")


def keep_top_k(logits_BV: Tensor, top_k: int) -> Tensor:
    """Set all but the `top_k` highest logits of each row to -inf; ties with the last of them stay. 0: all stay."""
    if top_k <= 0 or top_k >= logits_BV.shape[-1]:
        return logits_BV
    lowest_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < lowest_B1, float("-inf"))


def keep_top_p(logits_BV: Tensor, top_p: float) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities reach `top_p`; 0 and 1: all stay.

    Nucleus sampling: Holtzman et al. 2020, arXiv 1904.09751, section 3.1.
    """
    if top_p <= 0 or top_p >= 1:
        return logits_BV
    descending_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    probabilities_BV = descending_BV.softmax(dim=-1)
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    enough_BV = before_BV >= top_p
    return logits_BV.masked_fill(enough_BV.scatter(-1, order_BV, enough_BV), float("-inf"))


def filtered_logits(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """fp32 logits of the distribution to draw from: temperature (above 0), then top_k, then top_p."""
    scaled_BV = logits_BV.float() / sampling.temperature
    return keep_top_p(keep_top_k(scaled_BV, sampling.top_k), sampling.top_p)


def next_tokens(logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """One token for each row, row b drawn with `generators[b]`: a row's tokens do not depend on the others."""
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1).tolist()
    probabilities_BV = filtered_logits(logits_BV, sampling).softmax(dim=-1).cpu()
    return [
        int(torch.multinomial(probabilities_V, 1, generator=generator))
        for probabilities_V, generator in zip(probabilities_BV, generators, strict=True)
    ]


def sample_generator(seed: int, sample: int) -> torch.Generator:
    """The generator of sample number `sample` of a run seeded with `seed`."""
    words = np.random.SeedSequence([seed, sample]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]))
