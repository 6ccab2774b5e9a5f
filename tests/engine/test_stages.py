"""Layers divided into stages: against trying every cut, and the numbers NeoX users know."""

import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.engine.stages import balanced_bounds, num_parameters, stage_specs
from megatron.errors import ConfigError
from tests.model.small import decoder, model_args, specs


@st.composite
def _cuts(draw):
    weights = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    return weights, draw(st.integers(1, len(weights)))


def _stage_weights(weights, bounds):
    return [sum(weights[start:end]) for start, end in pairwise(bounds)]


@settings(max_examples=200, deadline=None)
@given(_cuts())
def test_no_other_cut_has_a_lighter_heaviest_stage_nor_is_more_even(cut):
    weights, num_stages = cut
    bounds = balanced_bounds(weights, num_stages)
    assert bounds[0] == 0 and bounds[-1] == len(weights) and len(bounds) == num_stages + 1
    assert all(start < end for start, end in pairwise(bounds))

    def cost(some_bounds):
        stages = _stage_weights(weights, some_bounds)
        return max(stages), sum(weight**2 for weight in stages)

    every = combinations(range(1, len(weights)), num_stages - 1)
    assert cost(bounds) == min(cost([0, *inner, len(weights)]) for inner in every)


def _kinds(method, num_stages, **fields):
    layers = specs(model_args(**fields))
    stages = [stage_specs(layers, method, stage=stage, num_stages=num_stages) for stage in range(num_stages)]
    assert [spec for stage in stages for spec in stage] == layers
    return ["".join(spec.kind[0] for spec in stage) for stage in stages]


def test_uniform_counts_layers_and_type_counts_blocks():
    assert _kinds("uniform", 3, num_layers=6) == ["ebb", "bbb", "bfh"]
    assert _kinds("type:transformer|mlp", 2, num_layers=4) == ["ebb", "bbfh"]
    assert _kinds("type:ParallelTransformerLayerPipe", 2, num_layers=3) == ["ebb", "bfh"]
    assert _kinds("type:transformer", 4, num_layers=5) == ["ebb", "b", "b", "bfh"]
    assert _kinds("uniform", 5, num_layers=2) == ["e", "b", "b", "f", "h"]
    assert _kinds("type:transformer", 1, num_layers=2) == ["ebbfh"]


def test_parameters_weigh_what_the_built_layers_have():
    args = model_args(num_layers=3)
    built = decoder(args)
    for spec in specs(args):
        assert num_parameters(spec) == sum(p.numel() for p in built.layers[str(spec.index)].parameters())
    # An embedding as heavy as all blocks together is a stage of its own, and so is the head.
    assert _kinds("parameters", 3, num_layers=3, padded_vocab_size=2000) == ["e", "bbbf", "h"]


def test_more_stages_than_layers_and_a_type_that_nothing_is_are_refused():
    with pytest.raises(ConfigError, match=r"6.*5"):
        _kinds("uniform", 6, num_layers=2)
    with pytest.raises(ConfigError, match=re.escape("type:mlp")):
        _kinds("type:mlp", 2, num_layers=2)
