"""Contract line 13: a weight shared between reentrant checkpoints fires twice, first with a part of its sum."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.errors import ConfigError
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import HIDDEN, Options, Trainer

pytestmark = pytest.mark.distributed


class _Segments(nn.Module):
    """Two checkpointed segments that share `shared`; `reentrant` None uses no checkpoints."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(6)
        self.reentrant = reentrant
        self.first, self.shared, self.second = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def _segment(self, inputs, own):
        return torch.tanh(self.shared(torch.tanh(own(inputs))))

    def forward(self, inputs):
        for own in (self.first, self.second):
            if self.reentrant is None:
                inputs = self._segment(inputs, own)
            else:
                inputs = checkpoint(self._segment, inputs, own, use_reentrant=self.reentrant)
        return inputs


def _loss(model, tokens):
    inputs = torch.ones(2, HIDDEN) * (tokens.float().mean() / 50)
    return model(inputs.requires_grad_()).square().mean()


def _fires_twice(rank):
    model = _Segments(reentrant=True)
    fired = []
    hook = model.shared.weight.register_post_accumulate_grad_hook(lambda weight: fired.append(weight.grad.clone()))
    _loss(model, torch.ones(1)).backward()
    hook.remove()
    try:
        Trainer(Options(), model=model, loss_of=_loss)
    except ConfigError as error:
        return fired, str(error)


def test_contract_13_a_weight_shared_between_reentrant_checkpoints_is_refused_by_name():
    for fired, message in run_ranks(2, _fires_twice):
        assert len(fired) == 2 and not torch.equal(*fired), "premise: the first firing has a part of the sum"
        assert "shared.weight" in message and "shared.bias" in message and "first.weight" not in message
        assert "reentrant" in message


def _gradients(rank):
    """Gradients without checkpoints, with non-reentrant ones, and with reentrant ones that only the steps have."""
    gradients = []
    for in_rehearsal, in_step in ((None, None), (False, False), (False, True)):
        model = _Segments(in_rehearsal)
        # One bucket, which waits for `first`, the last to be ready: it is launched after both firings.
        trainer = Trainer(Options(accumulation=2, bucket_elements=10**6), model=model, loss_of=_loss)
        model.reentrant = in_step
        trainer.backward(1)
        trainer.reducer.finish()
        gradients.append({name: gradient.clone() for name, gradient in trainer.reducer.gradients().items()})
    return gradients


def test_contract_13_non_reentrant_checkpoints_and_parts_that_arrive_before_the_launch_give_the_full_sum():
    for plain, *others in run_ranks(2, _gradients):
        for gradients in others:
            for name, gradient in plain.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-8, msg=name)


def _part_after_launch(rank):
    model = _Segments(reentrant=False)
    trainer = Trainer(Options(bucket_elements=1), model=model, loss_of=_loss)
    model.reentrant = True
    try:
        trainer.step(1)
    except RuntimeError as error:
        trainer.reducer.abort()
        return str(error)


def test_contract_13_a_part_after_the_launch_is_an_error_with_the_name_and_never_a_wrong_sum():
    assert all("shared." in message and "launched" in message for message in run_ranks(2, _part_after_launch))
