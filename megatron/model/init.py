"""How weights start: NeoX's named init methods, and one random generator for each parameter.

A parameter's values depend on the seed and its name only, so a model starts from the same numbers in whatever order,
on whatever stage and at whatever tensor size its layers are built.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn

from megatron.mpu.layers import InitMethod

if TYPE_CHECKING:
    from megatron.neox_arguments.model import ModelArgs


@runtime_checkable
class RandomlyInitialized(Protocol):
    """A module that draws its own parameters (not its children's), each from the generator of its name."""

    def draw_parameters(self, generator_of: Callable[[str], torch.Generator]) -> None:
        """Overwrite the parameters; `generator_of` takes a parameter's name within the module."""


@runtime_checkable
class ConstantlyInitialized(Protocol):
    """A module whose parameters start from constants: torch's and our norms."""

    def reset_parameters(self) -> None:
        """Overwrite the parameters."""


def initialize(module: nn.Module, *, seed: int, parameter_name: Callable[[str], str]) -> None:
    """Overwrite all parameters of a module with their starting values; does nothing to one on the meta device.

    `parameter_name` turns a name within `module` into the name in the whole model that the values belong to.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return
    for prefix, submodule in module.named_modules():
        if isinstance(submodule, RandomlyInitialized):
            submodule.draw_parameters(partial(_generator_in, seed, prefix, parameter_name))
        elif isinstance(submodule, ConstantlyInitialized):
            submodule.reset_parameters()


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator that depends on the seed and the parameter's name only, in every process and version."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:4], "big"))


def _generator_in(seed: int, prefix: str, parameter_name: Callable[[str], str], name: str) -> torch.Generator:
    return parameter_generator(seed, parameter_name(f"{prefix}.{name}" if prefix else name))


def input_init_method(args: ModelArgs) -> InitMethod:
    """Return `init_method`: of embeddings, query/key/value, the MLP's first projection and the head."""
    return init_method_named(args.init_method, args)


def output_init_method(args: ModelArgs) -> InitMethod:
    """Return `output_layer_init_method`: of the two projections that write to the residual stream."""
    return init_method_named(args.output_layer_init_method, args)


def init_method_named(name: str, args: ModelArgs) -> InitMethod:
    """Return the init method of a NeoX name. With L layers, hidden size d and s = `init_method_std`:

    - normal: N(0, s^2)
    - scaled_normal: std s / sqrt(2 L), two residual writes a layer (GPT-2, Radford et al. 2019)
    - single_residual_scaled_normal: std s / sqrt(L), one residual write a layer (parallel residual)
    - orthogonal, scaled_orthogonal: (semi-)orthogonal times sqrt(2), or sqrt(2 / L) (Saxe et al. 2013, arXiv:1312.6120)
    - xavier_uniform, xavier_normal: variance 2 / (fan_in + fan_out) of the full weight (Glorot & Bengio 2010)
    - small_init: std sqrt(2 / (5 d)) (Nguyen & Salazar 2019, arXiv:1910.05895)
    - wang_init: std 2 / (L sqrt(d)) (Wang & Komatsuzaki 2021, mesh-transformer-jax)
    """
    std, num_layers, hidden_size = args.init_method_std, args.num_layers, args.hidden_size
    methods: dict[str, InitMethod] = {
        "normal": partial(_normal, std),
        "scaled_normal": partial(_normal, std / math.sqrt(2 * num_layers)),
        "single_residual_scaled_normal": partial(_normal, std / math.sqrt(num_layers)),
        "orthogonal": partial(_orthogonal, math.sqrt(2)),
        "scaled_orthogonal": partial(_orthogonal, math.sqrt(2 / num_layers)),
        "xavier_uniform": _xavier_uniform,
        "xavier_normal": _xavier_normal,
        "small_init": partial(_normal, math.sqrt(2 / (5 * hidden_size))),
        "wang_init": partial(_normal, 2 / num_layers / math.sqrt(hidden_size)),
    }
    return methods[name]


def _normal(std: float, weight: torch.Tensor, generator: torch.Generator) -> None:
    nn.init.normal_(weight, 0.0, std, generator=generator)


def _orthogonal(gain: float, weight: torch.Tensor, generator: torch.Generator) -> None:
    nn.init.orthogonal_(weight, gain, generator=generator)


def _xavier_uniform(weight: torch.Tensor, generator: torch.Generator) -> None:
    nn.init.xavier_uniform_(weight, generator=generator)


def _xavier_normal(weight: torch.Tensor, generator: torch.Generator) -> None:
    nn.init.xavier_normal_(weight, generator=generator)
