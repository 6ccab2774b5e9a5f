"""Starting values: formulas, and independence of order, stage and tensor size."""

import math
import os
import subprocess
import sys

import pytest
import torch

from megatron.model.decoder import Decoder
from megatron.model.init import init_method_named, parameter_generator
from tests.model.small import decoder, model_args, specs

HIDDEN, LAYERS, STD = 256, 5, 0.03
ARGS = model_args(hidden_size=HIDDEN, num_layers=LAYERS, init_method_std=STD)

EXPECTED_STD = {
    "normal": STD,
    "scaled_normal": STD / math.sqrt(2 * LAYERS),
    "single_residual_scaled_normal": STD / math.sqrt(LAYERS),
    "small_init": math.sqrt(2 / (5 * HIDDEN)),
    "wang_init": 2 / LAYERS / math.sqrt(HIDDEN),
    "xavier_normal": math.sqrt(2 / (384 + HIDDEN)),
    "xavier_uniform": math.sqrt(2 / (384 + HIDDEN)),
}


def drawn(method):
    weight = torch.empty(384, HIDDEN)
    init_method_named(method, ARGS)(weight, parameter_generator(1, "weight"))
    return weight


@pytest.mark.parametrize("method", EXPECTED_STD)
def test_standard_deviation(method):
    weight = drawn(method)
    assert weight.std().item() == pytest.approx(EXPECTED_STD[method], rel=0.01)
    assert abs(weight.mean().item()) < 0.02 * EXPECTED_STD[method]


def test_xavier_distributions():
    bound = math.sqrt(6 / (384 + HIDDEN))
    assert 0.999 * bound < drawn("xavier_uniform").abs().max() <= bound
    assert drawn("xavier_normal").abs().max() > 3 * EXPECTED_STD["xavier_normal"]


@pytest.mark.parametrize(
    ("method", "gain"), [("orthogonal", math.sqrt(2)), ("scaled_orthogonal", math.sqrt(2 / LAYERS))]
)
def test_orthogonal(method, gain):
    weight = drawn(method)
    torch.testing.assert_close(weight.T @ weight, gain**2 * torch.eye(HIDDEN), atol=1e-5, rtol=0)


def test_which_method_falls_where():
    """wang_init is far from small_init here, so that a swap shows."""
    args = model_args(
        pos_emb="learned",
        hidden_size=192,
        ffn_hidden_size=768,
        num_layers=2,
        init_method="small_init",
        output_layer_init_method="wang_init",
    )
    small, wang = math.sqrt(2 / (5 * 192)), 2 / 2 / math.sqrt(192)
    for name, parameter in decoder(args).named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = wang if "attention.dense" in name or "4h_to_h" in name else small
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("tied", [False, True])
def test_values_depend_on_seed_and_name_only(tied):
    """Each layer alone, in reverse order, after other random numbers were drawn: the values of the whole model."""
    args = model_args(no_weight_tying=not tied, pos_emb="learned")
    whole = decoder(args, seed=5).state_dict()
    torch.manual_seed(99)
    for spec in reversed(specs(args, seed=5)):
        alone = Decoder([spec]).state_dict()
        assert alone
        for name, value in alone.items():
            assert torch.equal(value, whole[name]), name
    other_seed = decoder(args, seed=6).state_dict()
    weights = [name for name in whole if "norm" not in name and "bias" not in name]
    assert not any(torch.equal(whole[name], other_seed[name]) for name in weights)


def test_no_two_parameters_start_alike():
    weights = [
        p.flatten()[:8]
        for n, p in decoder(model_args(output_layer_init_method="normal")).named_parameters()
        if p.dim() == 2
    ]
    assert len({tuple(weight.tolist()) for weight in weights}) == len(weights) == 10


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    decoder(model_args())
    assert torch.equal(torch.get_rng_state(), before)


def test_generator_is_the_same_in_every_process():
    """Python's own hash of a string is not: it changes with PYTHONHASHSEED."""
    code = "from megatron.model.init import parameter_generator as g; print(g(3, 'layers.1.x').initial_seed())"
    seeds = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert seeds == {f"{parameter_generator(3, 'layers.1.x').initial_seed()}\n"}
