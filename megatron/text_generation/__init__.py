"""Text from a trained model: sampling, cached decoding, and the three ways NeoX users ask for it."""

from megatron.text_generation.decode import CacheFactory, CausalModel, Completion, DecodeSettings, generate_tokens
from megatron.text_generation.sampling import Sampling
from megatron.text_generation.tasks import Sample, TextGenerator, converse, generate_text, read_prompts, write_samples

__all__ = [
    "CacheFactory",
    "CausalModel",
    "Completion",
    "DecodeSettings",
    "Sample",
    "Sampling",
    "TextGenerator",
    "converse",
    "generate_text",
    "generate_tokens",
    "read_prompts",
    "write_samples",
]
