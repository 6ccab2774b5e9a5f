"""What `text_gen_type` asks for: unconditional samples, a file of prompts, or a conversation at the terminal."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron.errors import ConfigError, DataError
from megatron.text_generation.decode import CacheFactory, CausalModel, Completion, DecodeSettings, generate_tokens
from megatron.text_generation.sampling import sample_generator

logger = logging.getLogger(__name__)

TEXT_GEN_TYPES = ("unconditional", "input-file", "interactive")
_PROMPTS_A_BATCH = 16


class Tokenizer(Protocol):
    """What generation needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...


@dataclass(frozen=True)
class Sample:
    """One line of the output file. `context` is the prompt, `text` what the model made of it, `length` its tokens.

    `finished` means the model ended the text itself; `message` says why there is none. `duration_seconds` is that of
    the batch the sample was made in. `logits` are there with `return_logits`: one row a token.
    """

    context: str
    text: str
    length: int
    finished: bool
    message: str | None
    duration_seconds: float
    logits: list[list[float]] | None = None

    def to_json(self) -> str:
        """The line, without its end."""
        fields = asdict(self)
        if self.logits is None:
            del fields["logits"]
        return json.dumps(fields, ensure_ascii=False)


@dataclass(frozen=True)
class TextGenerator:
    """A model with its tokenizer. Sample n of a generator is drawn from `seed` and n, whatever batch it is in."""

    model: CausalModel
    tokenizer: Tokenizer
    settings: DecodeSettings
    seed: int
    make_cache: CacheFactory | None
    device: torch.device | str = "cpu"

    def samples(self, prompts: Iterable[str], *, first: int = 0) -> Iterator[Sample]:
        """Continue each prompt, in order, a batch at a time; an empty one starts from end-of-document."""
        batch: list[str] = []
        for prompt in prompts:
            batch.append(prompt)
            if len(batch) == _PROMPTS_A_BATCH:
                yield from self._batch(batch, first)
                first += len(batch)
                batch = []
        if batch:
            yield from self._batch(batch, first)

    def _batch(self, prompts: list[str], first: int) -> list[Sample]:
        start = time.perf_counter()
        encoded = [self.tokenizer.encode(prompt) or [self.settings.eod] for prompt in prompts]
        completions = generate_tokens(
            self.model,
            encoded,
            self.settings,
            generators=[sample_generator(self.seed, first + index) for index in range(len(prompts))],
            make_cache=self.make_cache,
            device=self.device,
        )
        duration_s = time.perf_counter() - start
        return [
            self._sample(prompt, len(tokens), completion, duration_s)
            for prompt, tokens, completion in zip(prompts, encoded, completions, strict=True)
        ]

    def _sample(self, prompt: str, prompt_length: int, completion: Completion, duration_s: float) -> Sample:
        limit = self.settings.max_length
        too_long = f"the prompt has {prompt_length} tokens; with the answer the model takes at most {limit}"
        return Sample(
            context=prompt,
            text=self.tokenizer.decode(completion.tokens),
            length=len(completion.tokens),
            finished=completion.finished,
            message=too_long if prompt_length >= limit else None,
            duration_seconds=duration_s,
            logits=_as_lists(completion.logits) if self.settings.return_logits else None,
        )


def _as_lists(logits: list[Tensor]) -> list[list[float]]:
    return [logits_V.tolist() for logits_V in logits]


def generate_text(
    generator: TextGenerator,
    *,
    text_gen_type: str | None,
    num_samples: int = 1,
    prompt_end: str = "\n",
    sample_input_file: str | Path | None = None,
    sample_output_file: str | Path | None = None,
) -> Path | None:
    """Do what `text_gen_type` says and return the file of samples written, None after a conversation.

    `unconditional` makes `num_samples` texts from nothing, `input-file` one for each prompt (by default into
    `<sample_input_file>.output.jsonl`), `interactive` talks. ConfigError for another type or a file that is not named.
    """
    sampling = generator.settings.sampling
    if sampling.temperature == 0 and (sampling.top_k or sampling.top_p):
        logger.warning("temperature is 0: the likeliest token is always taken, and top_k and top_p change nothing")
    if text_gen_type == "interactive":
        converse(generator, prompt_end=prompt_end)
        return None
    if text_gen_type == "unconditional":
        prompts = [""] * num_samples
        output = sample_output_file
    elif text_gen_type == "input-file":
        if sample_input_file is None:
            raise ConfigError("text_gen_type is 'input-file', but sample_input_file is not set")
        prompts = read_prompts(Path(sample_input_file), prompt_end)
        output = sample_output_file or f"{sample_input_file}.output.jsonl"
    else:
        raise ConfigError(f"text_gen_type is {text_gen_type!r}: it must be one of {', '.join(TEXT_GEN_TYPES)}")
    if output is None:
        raise ConfigError(f"text_gen_type is {text_gen_type!r}, but sample_output_file is not set")
    count = write_samples(generator.samples(prompts), Path(output))
    logger.info("%d samples written to %s", count, output)
    return Path(output)


def read_prompts(path: Path, prompt_end: str = "\n") -> list[str]:
    """The prompts of a file: what lies between `prompt_end`s, stripped, empty ones left out.

    Raises DataError when the file cannot be read or holds no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"sample_input_file {path} cannot be read: {error}") from error
    prompts = [prompt.strip() for prompt in text.split(prompt_end)]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise DataError(f"sample_input_file {path} holds no prompt (prompts end with {prompt_end!r})")
    return prompts


def write_samples(samples: Iterable[Sample], path: Path) -> int:
    """Write `samples` to `path`, one JSON object a line, as they are made; return how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(sample.to_json() + "\n")
            file.flush()
            count += 1
            if sample.message:
                logger.warning("sample %d: %s", count, sample.message)
    return count


def converse(
    generator: TextGenerator,
    *,
    prompt_end: str = "\n",
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = print,
) -> None:
    """Answer prompts from `read` (a line without its end, EOFError at the end) until there are no more."""
    for number, prompt in enumerate(_typed_prompts(prompt_end, read)):
        for sample in generator.samples([prompt], first=number):
            write(sample.message or sample.text)


def _typed_prompts(prompt_end: str, read: Callable[[str], str]) -> Iterator[str]:
    text = ""
    while True:
        try:
            text += read("... " if text else "prompt> ") + "\n"
        except (EOFError, KeyboardInterrupt):
            return
        *complete, text = text.split(prompt_end)
        yield from (prompt.strip() for prompt in complete)
        text = text.lstrip("\n")
