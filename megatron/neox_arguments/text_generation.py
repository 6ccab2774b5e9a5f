"""What a trained model is asked to write."""

from __future__ import annotations

from typing import Literal

from megatron.neox_arguments.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, Section


class TextGenerationArgs(Section):
    """Sampling and where texts come from and go to."""

    text_gen_type: Literal["unconditional", "input-file", "interactive"] = "unconditional"
    """Write from nothing, continue the prompts of a file, or answer at the terminal."""
    temperature: NonNegativeFloat = 0.0
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: NonNegativeInt = 0
    """Choose among this many likeliest tokens; 0 among all."""
    top_p: Probability = 0.0
    """Choose among the likeliest tokens that together have this probability; 0 among all."""
    maximum_tokens: PositiveInt = 64
    """Longest continuation in tokens."""
    prompt_end: str = "\n"
    """What ends a prompt in a file or at the terminal."""
    sample_input_file: str | None = None
    """File of prompts."""
    sample_output_file: str | None = "samples.txt"
    """Where samples go, one JSON object a line."""
    num_samples: PositiveInt = 1
    """Number of unconditional samples."""
    return_logits: bool = False
    """Write logits beside each sample."""
    recompute: bool = False
    """Compute all tokens again for each new one instead of caching keys and values."""
