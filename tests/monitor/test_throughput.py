import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.monitor.throughput import DecoderShape, Throughput, flops_per_token

GPT = DecoderShape(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_kv_heads=4,
    intermediate_size=128,
    is_gated=False,
    seq_length=24,
    padded_vocab_size=80,
)
LLAMA = DecoderShape(
    num_layers=2,
    hidden_size=48,
    num_attention_heads=6,
    num_kv_heads=2,
    intermediate_size=128,
    is_gated=True,
    seq_length=16,
    padded_vocab_size=64,
)


class PlainBlock(nn.Module):
    """Causal attention and MLP in plain torch, attention as two products so that torch's counter sees them."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        H = shape.hidden_size
        self.head_size = H // shape.num_attention_heads
        self.query = nn.Linear(H, H)
        self.key_value = nn.Linear(H, 2 * self.head_size * shape.num_kv_heads)
        self.projection = nn.Linear(H, H)
        self.up = nn.Linear(H, shape.intermediate_size)
        self.gate = nn.Linear(H, shape.intermediate_size) if shape.is_gated else None
        self.down = nn.Linear(shape.intermediate_size, H)

    def forward(self, x_BSH):
        B, S, H = x_BSH.shape
        repeats = self.shape.num_attention_heads // self.shape.num_kv_heads
        q = self.query(x_BSH).view(B, S, -1, self.head_size).transpose(1, 2)
        k, v = (
            part.reshape(B, S, -1, self.head_size).transpose(1, 2).repeat_interleave(repeats, 1)
            for part in self.key_value(x_BSH).chunk(2, -1)
        )
        mask = torch.full((S, S), float("-inf")).triu(1)
        attended = torch.softmax(q @ k.transpose(-1, -2) + mask, -1) @ v
        x_BSH = x_BSH + self.projection(attended.transpose(1, 2).reshape(B, S, H))
        up = nn.functional.gelu(self.up(x_BSH)) if self.gate is None else self.up(x_BSH) * self.gate(x_BSH).sigmoid()
        return x_BSH + self.down(up)


class PlainDecoder(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.blocks = nn.Sequential(*(PlainBlock(shape) for _ in range(shape.num_layers)))
        self.head = nn.Linear(shape.hidden_size, shape.padded_vocab_size, bias=False)

    def forward(self, tokens_BS):
        return self.head(self.blocks(self.embedding(tokens_BS)))


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_formula_counts_exactly_the_products_torch_counts(shape):
    """Tolerance 0: norms and activations are in neither count."""
    model = PlainDecoder(shape)
    num_sequences = 2
    tokens_BS = torch.randint(shape.padded_vocab_size, (num_sequences, shape.seq_length))
    with FlopCounterMode(display=False) as counter:
        model(tokens_BS).sum().backward()
    assert flops_per_token(shape) * num_sequences * shape.seq_length == counter.get_total_flops()


def test_a_published_model_costs_what_its_paper_says():
    """GPT-3 175B: about 3.14e23 FLOPs for 300 B tokens (Brown et al. 2020, table D.1, which leaves attention out)."""
    gpt3 = DecoderShape(
        num_layers=96,
        hidden_size=12288,
        num_attention_heads=96,
        num_kv_heads=96,
        intermediate_size=4 * 12288,
        is_gated=False,
        seq_length=2048,
        padded_vocab_size=50304,
    )
    assert flops_per_token(gpt3) * 300e9 == pytest.approx(3.14e23, rel=0.04)


def test_what_a_step_time_means():
    throughput = Throughput(tokens_per_step=4096, flops_per_token=2_000_000_000, num_devices=4, peak_tflops=8.192)
    assert throughput.tokens_per_s(0.5) == 8192
    assert throughput.tflops_per_device(0.5) == pytest.approx(8192 * 2e9 / 4 / 1e12)
    assert throughput.mfu(0.5) == pytest.approx(0.5)
    assert Throughput(4096, 2_000_000_000, 4, None).mfu(0.5) is None
