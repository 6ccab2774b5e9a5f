"""Token by token: prompts of different lengths in one batch, keys and values of earlier tokens kept.

All rows of a batch stand at the same position, which is what the cache holds. The shortest prompt is read in one go;
where a longer prompt still has tokens, those are fed instead of drawn ones, so no row needs padding or a mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.text_generation.sampling import Sampling, next_tokens

# (tokens_BS, cache or None) -> logits_BSV of these tokens; with a cache, the tokens follow those it has seen.
CausalModel = Callable[[Tensor, Any], Tensor]
# Number of tokens a row may get -> an empty cache.
CacheFactory = Callable[[int], Any]


@dataclass(frozen=True)
class DecodeSettings:
    """What ends a row (`maximum_tokens` new ones, `max_length` in all, `eod`) and which ids exist (`vocab_size`)."""

    sampling: Sampling
    maximum_tokens: int
    max_length: int
    eod: int
    vocab_size: int
    return_logits: bool = False


@dataclass
class Completion:
    """The tokens drawn after a prompt, without the closing `eod`. `finished`: the model ended it with `eod`.

    `logits` has a fp32 row of `vocab_size` values for each token and for the `eod`, if they were asked for.
    """

    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    logits: list[Tensor] = field(default_factory=list)


@dataclass
class _Row:
    prompt: Sequence[int]
    generator: torch.Generator
    settings: DecodeSettings
    completion: Completion = field(default_factory=Completion)

    @property
    def end(self) -> int:
        """Length of the row when it has all its tokens."""
        return min(len(self.prompt) + self.settings.maximum_tokens, self.settings.max_length)

    def draws_at(self, position: int) -> bool:
        """Whether the token at `position` is drawn, rather than given or of no interest any more."""
        return len(self.prompt) <= position < self.end and not self.completion.finished

    def is_open_at(self, position: int) -> bool:
        """Whether a token at `position` or later is still to be drawn."""
        return position < self.end and not self.completion.finished

    def token_at(self, position: int) -> int:
        """The prompt's token at `position`; past the prompt and where nothing is drawn, any token does."""
        return self.prompt[position] if position < len(self.prompt) else self.settings.eod

    def accept(self, token: int, logits_V: Tensor) -> None:
        """Take a drawn token."""
        if token == self.settings.eod:
            self.completion.finished = True
        else:
            self.completion.tokens.append(token)
        if self.settings.return_logits:
            self.completion.logits.append(logits_V.float().cpu())


@torch.inference_mode()
def generate_tokens(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    *,
    generators: Sequence[torch.Generator],
    make_cache: CacheFactory | None,
    device: torch.device | str = "cpu",
) -> list[Completion]:
    """Continue each of `prompts` (at least one token each), drawing row b with `generators[b]`.

    Without `make_cache` all tokens are computed again at each step. A prompt of `max_length` tokens or more gets none.
    Raises ValueError for an empty prompt: start from `eod` instead.
    """
    if not all(prompts):
        raise ValueError("a prompt needs at least one token: start an empty one from eod")
    rows = [_Row(prompt, generator, settings) for prompt, generator in zip(prompts, generators, strict=True)]
    rows_open = [row for row in rows if len(row.prompt) < row.end]
    if rows_open:
        _run(model, rows_open, make_cache, device)
    return [row.completion for row in rows]


def _run(model: CausalModel, rows: list[_Row], make_cache: CacheFactory | None, device: torch.device | str) -> None:
    position = min(len(row.prompt) for row in rows)
    cache = make_cache(max(row.end for row in rows)) if make_cache else None
    fed_BS = torch.tensor([row.prompt[:position] for row in rows], device=device)
    while any(row.is_open_at(position) for row in rows):
        logits_BV = model(fed_BS, cache)[:, -1, : rows[0].settings.vocab_size]
        new_B1 = torch.tensor(_advance(rows, position, logits_BV), device=device)[:, None]
        fed_BS = torch.cat((fed_BS, new_B1), dim=1) if cache is None else new_B1
        position += 1


def _advance(rows: list[_Row], position: int, logits_BV: Tensor) -> list[int]:
    """Draw for the rows that want it; return each row's token at `position`."""
    tokens = [row.token_at(position) for row in rows]
    drawing = [index for index, row in enumerate(rows) if row.draws_at(position)]
    if drawing:
        drawn = next_tokens(logits_BV[drawing], rows[0].settings.sampling, [rows[index].generator for index in drawing])
        for index, token in zip(drawing, drawn, strict=True):
            rows[index].accept(token, logits_BV[index])
            tokens[index] = token
    return tokens
