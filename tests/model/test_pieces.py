"""Norms, activations, positions and the loss against their formulas."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.model.attention import alibi_bias, causal_mask
from megatron.model.loss import lm_loss
from megatron.model.mlp import MLP
from megatron.model.norms import build_norm
from megatron.model.positions import SinusoidalPositions, alibi_slopes
from megatron.mpu.tensor_parallel import NOT_SPLIT
from tests.model.small import model_args


def test_scalenorm():
    norm = build_norm(model_args(norm="scalenorm", scalenorm_epsilon=2.0), 3)
    with torch.no_grad():
        norm.g.fill_(10.0)
    actual = norm(torch.tensor([[3.0, 0.0, 4.0], [0.0, 1.0, 0.0]]))
    assert torch.equal(actual, torch.tensor([[6.0, 0.0, 8.0], [0.0, 5.0, 0.0]]))


@pytest.mark.parametrize(
    ("norm", "epsilon"),
    [
        ("layernorm", "layernorm_epsilon"),
        ("non_parametric_layernorm", "layernorm_epsilon"),
        ("rmsnorm", "rms_norm_epsilon"),
    ],
)
def test_epsilon_is_under_the_root(norm, epsilon):
    x = torch.tensor([1.0, -1.0])
    actual = build_norm(model_args(norm=norm, **{epsilon: 3.0}), 2)(x)
    torch.testing.assert_close(actual, x / 2.0)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "scalenorm", "non_parametric_layernorm"])
def test_norm_statistics_do_not_overflow_fp16(norm):
    x = torch.full((1, 64), 10000.0, dtype=torch.float16)
    x[:, ::2] = -10000.0
    actual = build_norm(model_args(norm=norm), 64).half()(x).float()
    expected = 1.0 if norm != "scalenorm" else 1.0 / 8.0
    torch.testing.assert_close(actual.abs(), torch.full((1, 64), expected), rtol=1e-3, atol=0)


FORMULAS = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "relu": lambda x: x.clamp(min=0),
    "softsign": lambda x: x / (1 + x.abs()),
    "swish": lambda x: x / (1 + torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "mish": lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
}


@pytest.mark.parametrize("activation", FORMULAS)
def test_plain_activation(activation):
    mlp = MLP(model_args(activation=activation, hidden_size=4, ffn_hidden_size=4), NOT_SPLIT)
    with torch.no_grad():
        mlp.dense_h_to_4h.weight.copy_(torch.eye(4))
        mlp.dense_4h_to_h.weight.copy_(torch.eye(4))
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(mlp(x), FORMULAS[activation](x))


def test_sinusoidal_positions():
    actual = SinusoidalPositions(6)(2, 3)
    for row, position in enumerate((2, 3, 4)):
        angles = position / 10000 ** (np.array([0, 2, 4]) / 6)
        expected = np.concatenate((np.sin(angles), np.cos(angles)))
        np.testing.assert_allclose(actual[row].numpy(), expected, atol=1e-6)


def test_alibi_slopes():
    """The paper's example for 8 heads; for 6, the four of 4 heads and the first and third of 8."""
    assert alibi_slopes(8) == [2.0**-power for power in range(1, 9)]
    assert alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert len({*alibi_slopes(12)}) == 12


def test_alibi_bias_of_the_last_queries():
    bias = alibi_bias(torch.tensor([0.5, 0.25]), num_queries=2, num_keys=4, window=3)
    infinity = math.inf
    assert bias.tolist() == [
        [
            [[-infinity if key < 0 else -0.5 * key for key in (2, 1, 0, -1)], [-infinity, -1.0, -0.5, 0.0]],
            [[-infinity if key < 0 else -0.25 * key for key in (2, 1, 0, -1)], [-infinity, -0.5, -0.25, 0.0]],
        ]
    ]


def test_window_counts_the_token_itself():
    assert causal_mask(4, 4, 2, torch.device("cpu")).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


def loss_inputs(dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(2)
    logits = (scale * torch.randn(2, 5, 40, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(40, (2, 5), generator=generator)
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]])
    return logits, labels, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_loss_and_gradient_against_torch(dtype, scale):
    logits, labels, mask = loss_inputs(dtype, scale)
    theirs = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(theirs[mask.bool()], labels[mask.bool()])
    expected.backward()
    loss = lm_loss(logits, labels, mask)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    tolerance = 1e-7 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(logits.grad.double(), theirs.grad, rtol=0, atol=tolerance)


def test_loss_gradient_by_finite_differences():
    logits, labels, mask = loss_inputs()
    loss = lm_loss(logits, labels, mask)
    loss.backward()
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        ahead, behind = (lm_loss(logits + step * direction, labels, mask) for step in (0.01, -0.01))
    assert ((ahead - behind) / 0.02).item() == pytest.approx((logits.grad * direction).sum().item(), rel=1e-3)


def test_loss_without_tokens_is_zero():
    logits, labels, mask = loss_inputs()
    loss = lm_loss(logits, labels, torch.zeros_like(mask))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.abs().max() == 0.0


def test_second_backward_is_refused_not_wrong():
    logits, labels, mask = loss_inputs()
    loss = lm_loss(logits, labels, mask)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
