"""Contract lines 27 to 33: what user code may do between the stations, errors, order of calls, resume."""

import copy

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.distributed.toy import Options, Trainer, assert_same_bits, loss_of, tokens_of

pytestmark = pytest.mark.distributed


def _edited_by_user(rank):
    results = {}
    for overlap in (True, False):
        trainer = Trainer(Options(overlap=overlap, optimizer=torch.optim.SGD, learning_rate=1.0, max_norm=0.0))
        before = trainer.weights()
        trainer.backward(1)
        trainer.reducer.finish()
        model = trainer.model
        reduced = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.norm.weight.grad.mul_(2.0)
        model.norm.bias.grad = model.norm.bias.grad + 1.0
        model.last.bias.grad = None
        rate = trainer.optimizer.step().learning_rate
        moved = {name: (before[name] - weight) / rate for name, weight in trainer.weights().items()}
        results[overlap] = (moved, reduced)
    return results


def test_contract_27_the_optimizer_uses_what_stands_in_grad():
    for results in run_ranks(2, _edited_by_user):
        for moved, reduced in results.values():
            close = {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(moved["norm.weight"], 2.0 * reduced["norm.weight"], **close)
            torch.testing.assert_close(moved["norm.bias"], reduced["norm.bias"] + 1.0, **close)
            torch.testing.assert_close(moved["last.bias"], torch.zeros_like(moved["last.bias"]), **close)
            torch.testing.assert_close(moved["last.weight"], reduced["last.weight"], **close)


def _reallocated_before_launch(rank):
    trainer = Trainer(Options(accumulation=2))
    # A hook of the user's that replaces the gradient runs before the reducer reads it.
    trainer.reducer.close()
    trainer.model.norm.weight.register_hook(lambda grad: grad * 3.0)
    trainer.reducer = type(trainer.reducer)(
        dict(trainer.model.named_parameters()),
        trainer.plan,
        arithmetic=trainer.options.arithmetic,
        overlap=True,
    )
    plain = Trainer(Options(accumulation=2))
    results = []
    for each in (trainer, plain):
        each.backward(1)
        each.reducer.finish()
        results.append(each.reducer.gradients()["norm.weight"].clone())
    return results


def test_contract_27_gradients_are_read_when_they_are_launched():
    for tripled, plain in run_ranks(2, _reallocated_before_launch):
        torch.testing.assert_close(tripled, 3.0 * plain)


def _outside_a_step(rank):
    trainer, quiet = Trainer(Options()), Trainer(Options())
    calls, real = [], dist.all_reduce

    def counted(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs)

    for step in (1, 2):
        trainer.step(step)
        quiet.step(step)
        dist.all_reduce = counted
        with torch.no_grad():
            loss_of(trainer.model, tokens_of(7, 7, 7))
        loss_of(trainer.model, tokens_of(7, 7, rank)).backward()
        loss_of(trainer.model, tokens_of(7, 8, rank)).backward(inputs=[trainer.model.norm.weight])
        torch.autograd.grad(loss_of(trainer.model, tokens_of(7, 9, rank)), [trainer.model.last.weight])
        dist.all_reduce = real
    trainer.step(3)
    quiet.step(3)
    return len(calls), trainer.weights(), quiet.weights()


def test_contract_28_a_backward_outside_the_step_launches_nothing_and_counts_as_nothing():
    for calls, weights, quiet in run_ranks(2, _outside_a_step):
        assert calls == 0
        assert_same_bits(weights, quiet)


def _late_firing(rank):
    trainer = Trainer(Options(bucket_elements=1))
    trainer.reducer.begin_step(1)
    loss = loss_of(trainer.model, tokens_of(1, 0, rank))
    try:
        with trainer.reducer.backward_pass():
            loss.backward(retain_graph=True)
            loss.backward()
    except RuntimeError as error:
        message = str(error)
    trainer.reducer.abort()
    trainer.step(2)
    return message


def test_contract_29_a_gradient_after_its_bucket_was_launched_is_an_error_with_its_name():
    for message in run_ranks(2, _late_firing):
        assert "head.weight" in message and "second backward" in message


class _BoomError(Exception):
    pass


def fails_in_backward(rank, failing_ranks, options=Options()):  # noqa: B008
    """Fail in the first step's backward, train two more; return error, skipped, weights, and those of a quiet run."""
    trainer, quiet = Trainer(options), Trainer(options)

    def boom(grad):
        raise _BoomError("original text")

    # On rank 0 an early layer fails and on rank 1 a late one, so that different buckets are in flight.
    victim = trainer.model.norm.weight if rank == 0 else trainer.model.blocks[0].weight
    error_text = None
    handle = victim.register_hook(boom) if rank in failing_ranks else None
    try:
        trainer.backward(1)
        trainer.reducer.finish()
        skipped = float(trainer.optimizer.step().skipped)
    except _BoomError as error:
        error_text, skipped = str(error), None
        if trainer.reducer.abort():
            trainer.optimizer.abandon_update()
            trainer.optimizer.gather_parameters()
    if handle is not None:
        handle.remove()
    for step in (2, 3):
        trainer.step(step)
        quiet.step(step)
    return error_text, skipped, trainer.weights(), quiet.weights()


def test_contract_30_a_failed_backward_keeps_its_error_and_the_process_can_train_on():
    for error, _, weights, quiet in run_ranks(2, fails_in_backward, (0, 1)):
        assert error == "original text"
        assert_same_bits(weights, quiet)


def test_contract_30_when_one_rank_fails_no_other_takes_the_step():
    (error_0, _, weights_0, _), (error_1, skipped_1, weights_1, _) = run_ranks(2, fails_in_backward, (0,))
    assert error_0 == "original text" and error_1 is None
    assert skipped_1 == 1.0
    assert_same_bits(weights_0, weights_1)


def _out_of_order(rank):
    trainer, quiet = Trainer(Options()), Trainer(Options())
    refused = []

    def refuse(call):
        try:
            call()
        except RuntimeError as error:
            refused.append(str(error))

    refuse(trainer.optimizer.step)
    refuse(trainer.reducer.finish)
    trainer.backward(1)
    refuse(trainer.optimizer.step)
    refuse(lambda: trainer.reducer.begin_step(1))
    trainer.reducer.finish()
    trainer.reducer.finish()
    trainer.optimizer.step()
    refuse(trainer.optimizer.step)
    quiet.step(1)
    # zero_grad between backward and step: every gradient counts as zero, on every rank alike.
    trainer.backward(2)
    trainer.reducer.finish()
    trainer.model.zero_grad(set_to_none=True)
    norm = float(trainer.optimizer.step().grad_norm)
    return refused, norm, trainer.weights(), quiet.weights()


def test_contract_31_calls_out_of_order_are_refused_or_right():
    results = run_ranks(2, _out_of_order)
    for refused, norm, _, _ in results:
        assert len(refused) == 5, refused
        assert norm == 0.0
    assert_same_bits(results[0][2], results[1][2])


def _resume(rank):
    """Six steps straight against three, state carried over to a new trainer with the flag flipped, and three more."""
    outcomes = {}
    for dtype in (torch.float32, torch.bfloat16):
        straight = Trainer(Options(dtype=dtype))
        for step in range(1, 7):
            straight.step(step)
        first = Trainer(Options(dtype=dtype))
        for step in range(1, 4):
            first.step(step)
        second = Trainer(Options(dtype=dtype, overlap=False))
        second.model.load_state_dict(first.model.state_dict())
        saved = first.optimizer.named_state()
        for name, state in second.optimizer.named_state().items():
            assert state.keys() == saved[name].keys()
            for key, tensor in state.items():
                tensor.copy_(saved[name][key])
        second.optimizer.restore_progress(first.optimizer.progress)
        for step in range(4, 7):
            second.step(step)
        outcomes[dtype] = (straight.weights(), second.weights())
    return outcomes


def test_contract_32_resume_with_the_flag_flipped_goes_on_bit_for_bit():
    for outcomes in run_ranks(3, _resume):
        for straight, resumed in outcomes.values():
            assert_same_bits(straight, resumed)


def _swapped_and_copied(rank):
    trainer, quiet = Trainer(Options()), Trainer(Options())
    trainer.step(1)
    quiet.step(1)
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.clone()
    trainer.model.to(torch.float32)
    twin = copy.deepcopy(trainer.model)
    calls, real = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: calls.append(1)
    loss_of(twin, tokens_of(5, 5, rank)).backward()
    dist.all_reduce = real
    trainer.step(2)
    quiet.step(2)
    return calls, trainer.weights(), quiet.weights()


def test_contract_33_swapped_data_keeps_its_hook_and_a_deep_copy_has_none():
    for calls, weights, quiet in run_ranks(2, _swapped_and_copied):
        assert calls == []
        assert_same_bits(weights, quiet)
