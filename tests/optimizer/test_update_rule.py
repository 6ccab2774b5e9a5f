"""The update against torch's own optimizers and the papers' formulas; schedules against their closed forms."""

import math

import pytest
import torch

from megatron.optimizer.choice import UpdateRule
from megatron.optimizer.global_norm import GlobalNorm, clip_factor
from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.optimizer.lion import Lion
from megatron.optimizer.loss_scale import DynamicLossScale
from megatron.optimizer.weights import cast_parameters


def _schedule(style, minimum=0.0):
    return LearningRateSchedule(peak=1.0, minimum=minimum, warmup_updates=4, decay_updates=12, style=style)


def test_warmup_is_linear_and_ends_at_the_peak():
    assert [_schedule("cosine").at(update) for update in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("style", "midpoint", "end"),
    [("constant", 1.0, 1.0), ("linear", 0.5, 0.0), ("cosine", 0.5, 0.0), ("exponential", math.sqrt(0.5), 0.5)],
)
def test_decay_at_its_midpoint_end_and_after(style, midpoint, end):
    schedule = _schedule(style)
    assert schedule.at(8) == pytest.approx(midpoint)
    assert schedule.at(12) == pytest.approx(end)
    assert schedule.at(1000) == schedule.at(12)


def test_cosine_equals_torchs():
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.1)
    for update in range(4, 12):
        assert _schedule("cosine", minimum=0.1).at(update) == pytest.approx(torchs.get_last_lr()[0])
        optimizer.step()
        torchs.step()


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential"])
def test_decay_never_falls_below_the_minimum(style):
    assert min(_schedule(style, minimum=0.7).at(update) for update in range(4, 40)) >= 0.7


def test_a_schedule_without_warmup_starts_to_decay_with_the_first_update():
    assert LearningRateSchedule(3.0, 0.0, 0, 10, "linear").at(1) == pytest.approx(2.7)


def _parameters():
    torch.manual_seed(0)
    return {"weight": torch.nn.Parameter(torch.randn(4, 5)), "bias": torch.nn.Parameter(torch.randn(5))}


def _weights(parameters):
    return cast_parameters(parameters, torch.float32)


def _rule(name, **changes):
    return UpdateRule(
        name=name,
        schedule=_schedule("constant"),
        loss_scale=None,
        max_norm=0.0,
        **{"weight_decay": 0.1, "momentum": 0.9, **changes},
    )


def _set_gradients(parameters, step):
    for index, parameter in enumerate(parameters.values()):
        generator = torch.Generator().manual_seed(10 * step + index)
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_a_step_that_overflows_changes_nothing_be_it_the_first(name):
    clean, disturbed = _parameters(), _parameters()
    clean_inner, inner = _rule(name).build_inner(_weights(clean)), _rule(name).build_inner(_weights(disturbed))
    for step, found_inf in ((0, 1.0), (1, 0.0), (2, 1.0), (3, 0.0)):
        _set_gradients(disturbed, step)
        inner.grad_scale, inner.found_inf = torch.tensor(1.0), torch.tensor(found_inf)
        inner.step()
        if not found_inf:
            _set_gradients(clean, step)
            clean_inner.grad_scale, clean_inner.found_inf = torch.tensor(1.0), torch.tensor(0.0)
            clean_inner.step()
    for name_, parameter in clean.items():
        assert torch.equal(parameter, disturbed[name_])


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adamw", lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.0, fused=False, foreach=False)),
        ("sgd", lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, fused=False, foreach=False)),
    ],
)
def test_updates_equal_torchs_plain_optimizers(name, reference):
    ours, theirs = _parameters(), _parameters()
    inner, other = _rule(name, weight_decay=0.0).build_inner(_weights(ours)), reference(list(theirs.values()))
    for step in range(5):
        _set_gradients(ours, step)
        _set_gradients(theirs, step)
        inner.step()
        other.step()
    for key, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[key], rtol=1e-5, atol=1e-6)


def test_lion_follows_algorithm_2_of_its_paper():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = Lion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    theta, momentum = weight.detach().double(), torch.zeros(3, dtype=torch.double)
    for step in range(4):
        gradient = torch.tensor([0.3, -0.2, 0.1]) * (-1.0) ** step + 0.05
        weight.grad = gradient.clone()
        optimizer.step()
        update = torch.sign(0.9 * momentum + 0.1 * gradient.double())
        theta = theta - 0.1 * (update + 0.5 * theta)
        momentum = 0.99 * momentum + 0.01 * gradient.double()
    torch.testing.assert_close(weight.detach().double(), theta, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lion"])
def test_norms_and_biases_are_not_decayed(name):
    parameters = _parameters()
    groups = {
        group["weight_decay"]: group["params"] for group in _rule(name).build_inner(_weights(parameters)).param_groups
    }
    assert groups.keys() == {0.1, 0.0}
    assert groups[0.1][0] is parameters["weight"] and groups[0.0][0] is parameters["bias"]


def test_clipping_equals_torchs():
    gradients = [torch.randn(3, 4), torch.randn(7)]
    reference = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(reference, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = GlobalNorm(torch.device("cpu")).of(dict(enumerate(gradients)), 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference, 0.5))
    for parameter, gradient in zip(reference, gradients, strict=True):
        torch.testing.assert_close(gradient * clip_factor(norm, 0.5), parameter.grad)
    assert float(clip_factor(norm, 0.0)) == 1.0
    assert float(clip_factor(torch.tensor(0.1), 0.5)) == 1.0


def _scales(scale, overflows):
    values = []
    for overflowed in overflows:
        values.append(scale.value)
        scale.update(overflowed=overflowed)
    return [*values, scale.value]


def test_dynamic_loss_scale_halves_doubles_forgives_and_stops_at_its_minimum():
    assert _scales(DynamicLossScale(8.0, 2, 1, 2.0), [False, False, True, True, True, True]) == [8, 8, 16, 8, 4, 2, 2]
    assert _scales(DynamicLossScale(8.0, 2, 2, 1.0), [True, True, False, False, True]) == [8, 8, 4, 4, 8, 8]


def test_dynamic_loss_scale_goes_on_from_its_state():
    history = [False, True, False, False, True, True, False, False, False]
    straight, first = DynamicLossScale(64.0, 2, 2, 1.0), DynamicLossScale(64.0, 2, 2, 1.0)
    expected = _scales(straight, history)
    _scales(first, history[:5])
    second = DynamicLossScale(1.0, 2, 2, 1.0)
    second.restore(first.state())
    assert _scales(second, history[5:]) == expected[5:]
