"""The step through DeepSpeed's shell: against a plain torch loop in one process, on against off, errors, evaluation."""

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.toy import ToyModel, assert_same_bits, loss_of, tokens_of
from tests.engine.toy_engine import Tokens, ToyLoss, micro_batches, toy_engine

pytestmark = pytest.mark.distributed


def _plain_torch(num_steps, accumulation, world_size):
    """The same training in one process, with torch's own AdamW, clipping and schedule by hand."""
    model = ToyModel()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    losses, norms = [], []
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(world_size):
            for micro_batch in range(accumulation):
                loss = loss_of(model, tokens_of(step, micro_batch, rank)) / accumulation / world_size
                loss.backward()
                total += float(loss.detach())
        model.unused.grad = torch.zeros_like(model.unused)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * step / 2 if step <= 2 else optimizer_rate(step)
        optimizer.step()
        losses.append(total)
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_rate(step):
    return 0.5e-2 * (1 + torch.cos(torch.tensor(torch.pi * (step - 2) / 98)).item())


def _train(rank, accumulation, num_steps):
    runs = []
    for overlap in (True, False):
        engine = toy_engine(overlap=overlap, accumulation=accumulation)
        results = [engine.train_batch(micro_batches(step, rank, accumulation)) for step in range(1, num_steps + 1)]
        rows = [(float(result.loss), float(result.grad_norm), result.learning_rate) for result in results]
        weights = {name: parameter.detach().clone() for name, parameter in engine.module.model.named_parameters()}
        runs.append((rows, weights))
        engine.close()
    return runs


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (3, 2)])
def test_training_equals_plain_torch_in_one_process_and_on_equals_off(world_size, accumulation):
    losses, norms, expected = _plain_torch(5, accumulation, world_size)
    for (rows_on, weights_on), (rows_off, weights_off) in run_ranks(world_size, _train, accumulation, 5):
        assert rows_on == rows_off
        assert_same_bits(weights_on, weights_off)
        assert [row[0] for row in rows_on] == pytest.approx(losses, rel=1e-5)
        assert [row[1] for row in rows_on] == pytest.approx(norms, rel=1e-4)
        for name, weight in expected.items():
            torch.testing.assert_close(weights_on[name].reshape(weight.shape), weight, rtol=1e-4, atol=2e-5)


def _evaluate(rank):
    evaluated, quiet = toy_engine(accumulation=2), toy_engine(accumulation=2)
    losses = []
    for step in (1, 2):
        losses.append(float(evaluated.eval_batch(micro_batches(50 + step, rank, 2))))
        evaluated.train_batch(micro_batches(step, rank, 2))
        quiet.train_batch(micro_batches(step, rank, 2))
    gradients = [p.grad for p in evaluated.module.parameters() if p.grad is not None]
    weights = [
        {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
        for engine in (evaluated, quiet)
    ]
    return losses[0], len(gradients), weights


def test_evaluation_averages_over_ranks_and_micro_batches_and_disturbs_nothing():
    batch = torch.cat([tokens_of(51, micro_batch, rank) for rank in range(2) for micro_batch in range(2)])
    expected = float(loss_of(ToyModel(), batch).detach())
    for loss, num_gradients, (weights, quiet) in run_ranks(2, _evaluate):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert num_gradients == 0
        assert_same_bits(weights, quiet)


def _agree_to_stop(rank):
    engine = toy_engine()
    return [
        float(engine.train_batch(micro_batches(step, rank), stop_requested=rank == 1 and step == 2).stop_requested)
        for step in (1, 2)
    ]


def test_a_stop_asked_for_on_one_rank_is_known_to_all_in_the_same_step():
    assert run_ranks(2, _agree_to_stop) == [[0.0, 1.0], [0.0, 1.0]]


class _FailsOnce(ToyLoss):
    def __init__(self):
        super().__init__()
        self.fail = False

    def forward(self, micro_batch: Tokens):
        loss = super().forward(micro_batch)
        if self.fail:
            loss.register_hook(self._boom)
        return loss

    def _boom(self, _):
        raise ValueError("broken batch")


def _error_and_on(rank):
    module = _FailsOnce()
    engine, quiet = toy_engine(module=module), toy_engine()
    engine.train_batch(micro_batches(1, rank))
    module.fail = True
    try:
        engine.train_batch(micro_batches(2, rank))
        message = None
    except ValueError as error:
        message = str(error)
    module.fail = False
    engine.train_batch(micro_batches(3, rank))
    for step in (1, 3):
        quiet.train_batch(micro_batches(step, rank))
    return message, [dict(each.module.state_dict()) for each in (engine, quiet)]


def test_an_error_in_backward_surfaces_as_it_is_and_training_can_go_on():
    for message, (weights, quiet) in run_ranks(2, _error_and_on):
        assert message == "broken batch"
        assert_same_bits(weights, quiet)
