"""Where a token is: rotary, learned and sinusoidal embeddings, and the ALiBi slopes.

Tables are fp32 whatever the model's dtype, stay out of the state dict, and are recomputed when a module changes device
(so also when a model built on the meta device is materialised).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megatron.mpu.layers import InitMethod, draw_full, fill


class Float32Table(nn.Module):
    """One constant fp32 buffer `table`, which `compute(device)` makes."""

    table: torch.Tensor

    def __init__(self, compute: Callable[[torch.device | None], torch.Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.register_buffer("table", compute(None), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Float32Table:
        # Module.to, .bfloat16 and .to_empty all come through here: take their device, refuse their dtype and contents.
        device = fn(self.table).device
        if device != self.table.device:
            self.table = self.compute(device)
        return self


def inverse_frequencies(dim: int, base: float, device: torch.device | None) -> torch.Tensor:
    """Return base^(-2 i / dim), in radians a position, for i in 0 .. dim / 2 - 1, in fp32."""
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def angles(start: int, num_positions: int, frequencies_R: torch.Tensor) -> torch.Tensor:
    """Return position x frequency, in radians, for `num_positions` positions from `start` on as (S, R)."""
    positions_S = torch.arange(start, start + num_positions, dtype=torch.float32, device=frequencies_R.device)
    return torch.outer(positions_S, frequencies_R)


class Rotary(nn.Module):
    """Rotates pairs of features of queries and keys by an angle proportional to the position.

    Su et al. 2021, arXiv:2104.09864. The first `dim` features of a head are rotated, the others pass; feature i pairs
    with i + dim / 2, as in GPT-NeoX and Llama. Sines are computed where they are used: tables of a long context in
    every block would weigh more than they save.
    """

    def __init__(self, dim: int, *, base: float) -> None:
        super().__init__()
        self.dim = dim
        self.frequencies = Float32Table(partial(inverse_frequencies, dim, base))

    def forward(self, x_BSNMD: torch.Tensor, start: int) -> torch.Tensor:
        """Rotate the N x M heads of S tokens, the first of which is at position `start`; same shape and dtype."""
        head_dim = x_BSNMD.shape[-1]
        half, num_passing = self.dim // 2, head_dim - self.dim
        angles_SR = angles(start, x_BSNMD.shape[1], self.frequencies.table)
        cos_SR, sin_SR = angles_SR.cos(), angles_SR.sin()
        # Whole heads at once, the passing features by 1 and 0: half as many operations, each on contiguous memory.
        cos_SD = F.pad(torch.cat((cos_SR, cos_SR), dim=-1), (0, num_passing), value=1.0)
        sin_SD = F.pad(torch.cat((-sin_SR, sin_SR), dim=-1), (0, num_passing))
        first, second, passing = x_BSNMD.split((half, half, num_passing), dim=-1)
        swapped_BSNMD = torch.cat((second, first, passing), dim=-1)
        rotated_BSNMD = (x_BSNMD * cos_SD[:, None, None]).addcmul_(swapped_BSNMD, sin_SD[:, None, None])
        return rotated_BSNMD.to(x_BSNMD.dtype)


class LearnedPositions(nn.Module):
    """A learned vector for each position; position p is row p + `offset` (OPT leaves its first two rows unused)."""

    def __init__(self, num_positions: int, dim: int, *, offset: int, init_method: InitMethod) -> None:
        super().__init__()
        self.num_positions = num_positions
        self.offset = offset
        self.init_method = init_method
        self.weight = nn.Parameter(torch.empty(num_positions + offset, dim))

    def draw_parameters(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Draw the table, the same on every tensor rank."""
        num_rows, dim = self.weight.shape
        fill(self.weight, draw_full((num_rows, dim), self.init_method, generator_of("weight")))

    def forward(self, start: int, num_tokens: int) -> torch.Tensor:
        """Return the vectors of positions start .. start + S as (S, H). Raises ValueError beyond the last position."""
        end = start + num_tokens
        if end > self.num_positions:
            raise ValueError(f"{end} positions are needed, max_position_embeddings is {self.num_positions}")
        return self.weight[start + self.offset : end + self.offset]


class SinusoidalPositions(nn.Module):
    """Sines, then cosines, of position x frequency (Vaswani et al. 2017, arXiv:1706.03762)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.frequencies = Float32Table(partial(inverse_frequencies, dim, 10000.0))

    def forward(self, start: int, num_tokens: int) -> torch.Tensor:
        """Return the fp32 vectors of positions start .. start + S as (S, H)."""
        angles_SR = angles(start, num_tokens, self.frequencies.table)
        return torch.cat((angles_SR.sin(), angles_SR.cos()), dim=-1)


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head (Press et al. 2021, arXiv:2108.12409).

    For a power of two n they are 2^(-8/n), 2^(-16/n), ... 2^(-8). Other numbers take those of the power of two below,
    then every second one, from the first, of the power of two above.
    """
    power_of_two = 2 ** math.floor(math.log2(num_heads))
    slopes = _geometric_slopes(power_of_two)
    return slopes + _geometric_slopes(2 * power_of_two)[0::2][: num_heads - power_of_two]


def _geometric_slopes(num_heads: int) -> list[float]:
    return [2.0 ** (-8.0 * (head + 1) / num_heads) for head in range(num_heads)]
