"""Which layers each pipeline stage gets: NeoX's `pipe_partition_method`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from megatron.errors import ConfigError
from megatron.model.decoder import LayerSpec

# What NeoX calls a layer of the kind, as far as its `type:` patterns are concerned.
_NEOX_NAMES = {"block": "ParallelTransformerLayerPipe"}


def stage_specs(specs: Sequence[LayerSpec], method: str, *, stage: int, num_stages: int) -> Sequence[LayerSpec]:
    """Return the consecutive layers of one stage.

    `method` is how a layer weighs: `uniform` one each, `parameters` by its number of parameters, `type:<regex>` one
    where the regular expression is found in NeoX's name of the layer, in any case, and else nothing. The heaviest
    stage is as light as it can be, and every stage has a layer.

    Raises ConfigError when there are fewer layers than stages, or no layer is of the type.
    """
    if num_stages > len(specs):
        raise ConfigError(f"{num_stages} pipeline stages are more than the {len(specs)} layers there are to divide")
    if num_stages == 1:
        return specs
    bounds = balanced_bounds(_weights(specs, method), num_stages)
    return specs[bounds[stage] : bounds[stage + 1]]


def num_parameters(spec: LayerSpec) -> int:
    """Return the number of parameters of a layer on this tensor rank, without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in spec.build().parameters())


def balanced_bounds(weights: Sequence[int], num_stages: int) -> list[int]:
    """Return num_stages + 1 rising indices that cut `weights` into consecutive stages, none of them empty.

    The heaviest stage is as light as possible. Of all such cuts, the one with the least sum of squared stage weights is
    taken, and of those the one that leaves least to the last stages, which also have head and loss.
    """
    sums = [0, *accumulate(weights)]
    heaviest, _ = _best_cut(sums, num_stages, lambda before, weight: max(before, weight))
    limit = heaviest

    def sum_of_squares(before: float, weight: int) -> float:
        return before + weight**2 if weight <= limit else float("inf")

    _, bounds = _best_cut(sums, num_stages, sum_of_squares)
    return bounds


def _weights(specs: Sequence[LayerSpec], method: str) -> list[int]:
    if method == "uniform":
        return [1 for _ in specs]
    if method == "parameters":
        return [num_parameters(spec) for spec in specs]
    pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
    weights = [int(spec.kind in _NEOX_NAMES and bool(pattern.search(_NEOX_NAMES[spec.kind]))) for spec in specs]
    if not any(weights):
        raise ConfigError(f"pipe_partition_method {method} matches no layer; blocks are called {_NEOX_NAMES['block']}")
    return weights


def _best_cut(sums: Sequence[int], num_stages: int, cost: Callable[[float, int], float]) -> tuple[float, list[int]]:
    """Return the least cost of cutting len(sums) - 1 layers into stages, and the bounds that have it.

    `sums[i]` is the weight of the first i layers. `cost` takes the cost of all stages before one and the weight of that
    one, and must not fall when either rises: then the best cut of some layers has the best cut of fewer in it.
    """
    num_layers = len(sums) - 1
    # Of the first `end` layers in the stages so far: the cost, and the bounds.
    best: list[tuple[float, list[int]]] = [(0, [0])] + [(float("inf"), [0])] * num_layers
    for stage in range(1, num_stages + 1):
        cut = [(float("inf"), [0])] * (num_layers + 1)
        for end in range(stage, num_layers + 1):
            for start in range(stage - 1, end):
                candidate = cost(best[start][0], sums[end] - sums[start])
                if candidate <= cut[end][0]:  # of equals the last, which leaves the later stage less
                    cut[end] = (candidate, [*best[start][1], end])
        best = cut
    return best[num_layers]
