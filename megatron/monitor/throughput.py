"""Model FLOPs, and what a step time means in tokens and TFLOPS."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder that decide its FLOPs."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    intermediate_size: int
    """Width of the MLP between its projections (after the gate, if it has one)."""
    is_gated: bool
    """Whether the MLP has a gate (swiglu, geglu): three projections instead of two."""
    seq_length: int
    padded_vocab_size: int

    @property
    def num_matmul_weights(self) -> int:
        """Weights every token is multiplied with: projections of all layers and the head, not the embedding lookup."""
        kv_size = self.hidden_size * self.num_kv_heads // self.num_attention_heads
        attention = self.hidden_size * (2 * self.hidden_size + 2 * kv_size)
        mlp = self.hidden_size * self.intermediate_size * (3 if self.is_gated else 2)
        return self.num_layers * (attention + mlp) + self.hidden_size * self.padded_vocab_size


def flops_per_token(shape: DecoderShape) -> int:
    """Floating-point operations of forward and backward for one token: 6 N + 12 L H S.

    N are the weights tokens are multiplied with: 2 operations each forward, 4 backward. 12 L H S are the two products
    of attention (queries with keys, scores with values), each 2 H S forward and twice that backward, in L layers.
    This is PaLM's count (Chowdhery et al. 2022, appendix B) and, for an MLP of 4 H, Megatron's (Narayanan et al.
    2021, section 5.1: 72 B S L H^2 (1 + S / 6H + V / 12 L H) without recomputation). Like both and like GPT-NeoX, it
    counts all S keys for every query: neither the causal mask nor a sliding window makes it smaller. What activation
    checkpointing computes again is not counted, and norms, activations and the optimizer are left out.
    """
    attention = 12 * shape.num_layers * shape.hidden_size * shape.seq_length
    return 6 * shape.num_matmul_weights + attention


@dataclass(frozen=True)
class Throughput:
    """What one step of the whole run is worth, whatever its time."""

    tokens_per_step: int
    """Of the global batch."""
    flops_per_token: int
    num_devices: int
    """Of the whole run: data, tensor and pipeline ranks together."""
    peak_tflops: float | None
    """Of one device; None when it is not known."""

    def tokens_per_s(self, step_time_s: float) -> float:
        """Tokens a second of the whole run."""
        return self.tokens_per_step / step_time_s

    def tflops_per_device(self, step_time_s: float) -> float:
        """Model TFLOPS of one device."""
        return self.tokens_per_s(step_time_s) * self.flops_per_token / self.num_devices / 1e12

    def mfu(self, step_time_s: float) -> float | None:
        """Model FLOPs utilisation, 0 to 1; None without a known peak."""
        return None if self.peak_tflops is None else self.tflops_per_device(step_time_s) / self.peak_tflops
