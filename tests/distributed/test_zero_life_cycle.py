"""Contract lines 28, 30, 31 and 32 where gradients are scattered and the update is sharded; line 28 between passes."""

import pytest
import torch

from megatron.data_parallel.collective import Collective
from tests.distributed.ranks import run_ranks
from tests.distributed.test_life_cycle import fails_in_backward
from tests.distributed.toy import Options, Trainer, assert_same_bits, loss_of, tokens_of

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2)


class _CountedCollectives:
    """Counts every collective that gradients or parameters start, whatever its kind."""

    def __init__(self):
        self.count = 0

    def __enter__(self):
        self._real = real = Collective.__init__

        def counted(*args, **kwargs):
            self.count += 1
            real(*args, **kwargs)

        Collective.__init__ = counted
        return self

    def __exit__(self, *_):
        Collective.__init__ = self._real


def _disturb(trainer):
    """What is not training: evaluation, and three ways to get gradients for oneself. Return how much it sent."""
    with _CountedCollectives() as collectives:
        with torch.no_grad():
            loss_of(trainer.model, tokens_of(7, 7, 7))
        loss_of(trainer.model, tokens_of(7, 7, trainer.rank)).backward()
        loss_of(trainer.model, tokens_of(7, 8, trainer.rank)).backward(inputs=[trainer.model.norm.weight])
        torch.autograd.grad(loss_of(trainer.model, tokens_of(7, 9, trainer.rank)), [trainer.model.last.weight])
    return collectives.count


def _disturbed(rank, stage):
    options = Options(zero_stage=stage, accumulation=3)
    trainer, quiet = Trainer(options), Trainer(options)
    sent, rows = [], []
    for step in (1, 2, 3):
        loss = trainer.backward(step, after_backward=lambda _: sent.append(_disturb(trainer)))
        trainer.reducer.finish()
        rows.append((loss, float(trainer.optimizer.step().grad_norm)))
        sent.append(_disturb(trainer))
        loss, outcome = quiet.step(step)
        rows.append((loss, float(outcome.grad_norm)))
    return sent, rows, trainer.weights(), quiet.weights()


@pytest.mark.parametrize("stage", STAGES)
def test_contract_28_what_runs_between_steps_and_between_micro_batches_is_no_part_of_training(stage):
    for sent, rows, weights, quiet in run_ranks(2, _disturbed, stage):
        assert sent == [0] * 12
        assert rows[::2] == rows[1::2]
        assert_same_bits(weights, quiet)


def _fails_on_all(rank, stage):
    return fails_in_backward(rank, (0, 1), Options(zero_stage=stage, accumulation=2))


@pytest.mark.parametrize("stage", [1, 2])
def test_contract_30_a_failed_scattered_backward_keeps_its_error_and_the_process_can_train_on(stage):
    for error, _, weights, quiet in run_ranks(2, _fails_on_all, stage):
        assert error == "original text"
        assert_same_bits(weights, quiet)


def _refused(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "not refused"


def _out_of_order(rank, stage):
    options = Options(zero_stage=stage, accumulation=2)
    trainer, quiet = Trainer(options), Trainer(options)
    for each in (trainer, quiet):
        each.step(1)
    before, state = trainer.weights(), _copy(trainer.optimizer.named_state())
    messages = [_refused(trainer.optimizer.step)]
    trainer.backward(2)
    in_flight = [bucket.plan.index for bucket in trainer.reducer._buckets if bucket.launched]
    messages += [_refused(call) for call in (trainer.optimizer.step, trainer.reducer.close)]
    messages.append(_refused(lambda: trainer.reducer.begin_step(1)))
    # What a checkpoint would write now, and what an evaluation would read.
    assert_same_bits(trainer.weights(), before)
    for name, tensors in trainer.optimizer.named_state().items():
        assert_same_bits(tensors, state[name])
    trainer.reducer.finish()
    trainer.reducer.finish()
    trainer.optimizer.step()
    messages += [_refused(trainer.optimizer.step)]
    quiet.step(2)
    weights = trainer.weights(), quiet.weights()
    trainer.reducer.close()
    loss_of(trainer.model, tokens_of(3, 0, rank)).backward()
    return in_flight, messages, *weights, trainer.model.norm.weight.grad is not None


def _copy(state):
    return {name: {key: value.clone() for key, value in tensors.items()} for name, tensors in state.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_contract_31_calls_with_works_in_flight_are_refused_or_see_the_step_before(stage):
    for in_flight, messages, weights, quiet, is_ordinary in run_ranks(2, _out_of_order, stage):
        assert len(in_flight) > 2, "premise: something is in flight"
        calls = ("gradients()", "gradients()", "close()", "begin_step()", "gradients()")
        for call, message in zip(calls, messages, strict=True):
            assert message.startswith(f"{call} while "), message
        assert_same_bits(weights, quiet)
        assert is_ordinary


def _resumed(rank, stage):
    """Six steps straight; three, and three more after the state has moved to a trainer with the flag flipped."""
    options = Options(zero_stage=stage, dtype=torch.bfloat16)
    straight, first = Trainer(options), Trainer(options)
    for step in range(1, 7):
        straight.step(step)
    for step in range(1, 4):
        first.step(step)
    second = Trainer(Options(zero_stage=stage, dtype=torch.bfloat16, overlap=False))
    second.model.load_state_dict(first.model.state_dict())
    saved = first.optimizer.named_state()
    for name, tensors in second.optimizer.named_state().items():
        assert tensors.keys() == saved[name].keys()
        for key, tensor in tensors.items():
            tensor.copy_(saved[name][key])
    second.optimizer.restore_progress(first.optimizer.progress)
    rows = [float(second.step(step)[1].grad_norm) for step in range(4, 7)]
    return rows, straight.weights(), second.weights()


@pytest.mark.parametrize("stage", [1, 2])
def test_contract_32_sharded_state_goes_on_bit_for_bit_with_the_flag_flipped(stage):
    for rows, straight, resumed in run_ranks(2, _resumed, stage):
        assert len(set(rows)) == 3
        assert_same_bits(straight, resumed)
