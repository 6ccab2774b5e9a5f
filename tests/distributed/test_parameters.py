"""Contract lines 11, 14 to 16, 20 and 21: parameters that are shared, unused, frozen, empty or oddly shaped."""

import logging

import pytest
import torch
from torch import nn

from megatron.data_parallel.partition import ReductionGroup, plan_buckets
from megatron.errors import ConfigError
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import HIDDEN, Options, ToyModel, Trainer, loss_of, tokens_of

pytestmark = pytest.mark.distributed


def _tied(rank):
    trainer = Trainer(Options(tied=True, accumulation=2))
    slots = [slot.name for bucket in trainer.plan.buckets for slot in bucket.slots]
    trainer.backward(1)
    trainer.reducer.finish()
    return slots.count("embedding.weight"), "head.weight" in slots, trainer.reducer.gradients()["embedding.weight"]


def test_contract_11_a_weight_used_twice_is_reduced_once_with_the_full_sum():
    model = ToyModel(tied=True)
    for rank in range(2):
        for micro_batch in range(2):
            (loss_of(model, tokens_of(1, micro_batch, rank)) / 4).backward()
    for count, head_too, gradient in run_ranks(2, _tied):
        assert (count, head_too) == (1, False)
        torch.testing.assert_close(gradient, model.embedding.weight.grad, rtol=1e-5, atol=1e-7)


class _UsedByRank(nn.Module):
    """`odd` takes part on rank 1 only, `even` on rank 0 only, `nobody` on none."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(3)
        self.rank = rank
        self.shared, self.even, self.odd, self.nobody = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.everything = False

    def forward(self, inputs):
        hidden = self.shared(inputs)
        if self.everything or self.rank == 0:
            hidden = self.even(hidden)
        if self.everything or self.rank == 1:
            hidden = self.odd(hidden)
        return hidden


def _loss(model, tokens):
    return model(torch.ones(2, HIDDEN)).square().mean()


def _unused(rank):
    model = _UsedByRank(rank)
    model.everything = True
    trainer = Trainer(Options(bucket_elements=1), model=model, loss_of=_loss)
    model.everything = False
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("megatron.data_parallel.grad_reducer").addHandler(handler)
    trainer.backward(1)
    trainer.reducer.finish()
    gradients = {name: gradient.clone() for name, gradient in trainer.reducer.gradients().items()}
    for step in (2, 3):
        trainer.step(step)
    alone = _UsedByRank(rank)
    _loss(alone, None).backward()
    mine = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    return gradients, mine, records


def test_contract_14_unused_on_this_rank_counts_as_zeros_is_named_once_and_hangs_nobody():
    (on_0, mine_0, log_0), (on_1, mine_1, log_1) = run_ranks(2, _unused)
    for gradients in (on_0, on_1):
        torch.testing.assert_close(gradients["even.weight"], mine_0["even.weight"] / 2)
        torch.testing.assert_close(gradients["odd.weight"], mine_1["odd.weight"] / 2)
        assert not gradients["nobody.weight"].any()
    assert "odd.weight" in log_0[0] and "even.weight" in log_1[0] and "nobody.bias" in log_0[0]
    assert sum("odd.weight" in line for line in log_0) == 1


def _no_gradient_at_all(rank):
    model = nn.Linear(HIDDEN, HIDDEN)

    def cut(model, tokens):
        return (model(torch.ones(1, HIDDEN)).detach() + torch.zeros((), requires_grad=True)).sum()

    try:
        Trainer(Options(), model=model, loss_of=cut)
    except ConfigError as error:
        return str(error)


def test_contract_14_no_gradient_in_the_first_backward_is_an_error_with_names():
    message = run_ranks(1, _no_gradient_at_all)[0]
    assert "weight" in message and "none of the 2" in message


class _ReturnsNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight):
        return inputs * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Edges(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.gone = nn.Parameter(torch.ones(3))
        self.times_zero = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return _ReturnsNone.apply(self.linear(inputs), self.gone) + 0.0 * self.times_zero


def _none_gradient(rank):
    trainer = Trainer(Options(bucket_elements=1), model=_Edges(), loss_of=_loss)
    trainer.backward(1)
    missing = [name for bucket in trainer.reducer._buckets for name in bucket.missing]
    trainer.reducer.finish()
    gradients = trainer.reducer.gradients()
    return missing, gradients["gone"], gradients["times_zero"], gradients["linear.weight"].abs().sum()


def test_contract_15_a_gradient_of_none_counts_as_zeros_and_zero_is_not_unused():
    for missing, gone, times_zero, others in run_ranks(2, _none_gradient):
        assert missing == ["gone"]
        assert not gone.any() and not times_zero.any() and others > 0


def _frozen(rank):
    trainer = Trainer(Options())
    slots = [slot.name for bucket in trainer.plan.buckets for slot in bucket.slots]
    trainer.step(1)
    messages = []
    for name, requires_grad in (("frozen", True), ("norm.weight", False)):
        parameter = dict(trainer.model.named_parameters())[name]
        parameter.requires_grad_(requires_grad)
        try:
            trainer.step(2)
        except RuntimeError as error:
            messages.append(str(error))
        parameter.requires_grad_(not requires_grad)
    trainer.step(3)
    return "frozen" in slots, messages


def test_contract_16_frozen_is_in_no_bucket_and_a_change_is_refused_by_name():
    for in_plan, messages in run_ranks(2, _frozen):
        assert not in_plan
        assert "frozen" in messages[0] and "norm.weight" in messages[1]


def _awkward(rank):
    trainer = Trainer(Options(bucket_elements=100))
    trainer.backward(1)
    trainer.reducer.finish()
    alone = [len(bucket.slots) for bucket in trainer.plan.buckets if "embedding.weight" in str(bucket.slots)]
    dtypes = [{trainer.parameters[slot.name].dtype for slot in bucket.slots} for bucket in trainer.plan.buckets]
    return {name: g.clone() for name, g in trainer.reducer.gradients().items()}, alone, dtypes


def test_contract_20_empty_0_dim_transposed_and_oversized_parameters_all_work():
    model = ToyModel()
    for rank in range(2):
        (loss_of(model, tokens_of(1, 0, rank)) / 2).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradients, alone, dtypes in run_ranks(2, _awkward):
        for name in ("empty", "scale", "transposed", "embedding.weight"):
            torch.testing.assert_close(gradients[name], expected[name], rtol=1e-5, atol=1e-7)
        assert alone == [1]
        assert all(len(members) == 1 for members in dtypes)


def test_contract_20_one_dtype_a_bucket():
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    model[1].to(torch.bfloat16)
    parameters = dict(model.named_parameters())
    plan = plan_buckets(list(parameters), parameters, lambda _: ReductionGroup("data", 2, 2), bucket_elements=10**6)
    assert {bucket.parameter_dtype for bucket in plan.buckets} == {"torch.float32", "torch.bfloat16"}
    for bucket in plan.buckets:
        assert {str(parameters[slot.name].dtype) for slot in bucket.slots} == {bucket.parameter_dtype}


def _sparse(rank):
    model = nn.Embedding(10, HIDDEN, sparse=True)
    try:
        Trainer(Options(), model=model, loss_of=lambda model, _: model(torch.tensor([1, 2])).sum())
    except ConfigError as error:
        return str(error)


def test_contract_21_sparse_gradients_are_refused_by_name():
    assert "weight" in run_ranks(1, _sparse)[0]
