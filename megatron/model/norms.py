"""The norms of NeoX's `norm` argument."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from megatron.neox_arguments.model import ModelArgs


def build_norm(args: ModelArgs, size: int) -> nn.Module:
    """Return the norm of `args.norm` over a last dim of `size`. Statistics are fp32 in every dtype.

    - layernorm: weight, and bias with `use_bias_in_norms`
    - non_parametric_layernorm: no parameters (OLMo, Groeneveld et al. 2024, arXiv:2402.00838); `layernorm_epsilon`
    - rmsnorm: x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, arXiv:1910.07467), never a bias
    - scalenorm: see `ScaleNorm`
    """
    if args.norm == "layernorm":
        return nn.LayerNorm(size, eps=args.layernorm_epsilon, bias=args.use_bias_in_norms)
    if args.norm == "non_parametric_layernorm":
        return nn.LayerNorm(size, eps=args.layernorm_epsilon, elementwise_affine=False)
    if args.norm == "rmsnorm":
        return nn.RMSNorm(size, eps=args.rms_norm_epsilon)
    if args.norm == "scalenorm":
        return ScaleNorm(eps=args.scalenorm_epsilon)
    raise AssertionError(f"arguments let an unknown norm through: {args.norm}")


class ScaleNorm(nn.Module):
    """x / max(|x|, eps) * g with one learned scalar g (Nguyen & Salazar 2019, arXiv:1910.05895).

    g starts at 1, as in NeoX; the paper starts it at sqrt(size).
    """

    def __init__(self, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        """Set g to 1."""
        nn.init.ones_(self.g)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm over the last dim; same shape and dtype."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x * (self.g / norm.clamp(min=self.eps))).to(x.dtype)
