"""Contract lines 1 to 4: the flag decides when, never what; and what is right by torch's own reckoning."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.ranks import run_ranks
from tests.distributed.toy import Options, ToyModel, Trainer, assert_same_bits, loss_of, tokens_of, train

pytestmark = pytest.mark.distributed


def _on_and_off(rank, num_steps):
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        for accumulation in (1, 3):
            runs = [
                train(rank, Options(overlap=overlap, accumulation=accumulation, dtype=dtype, tied=True), num_steps)
                for overlap in (True, False, True)
            ]
            results[dtype, accumulation] = runs
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_contract_01_and_04_on_equals_off_bit_for_bit(world_size):
    results = run_ranks(world_size, _on_and_off, 4)
    for case in results[0]:
        for rank in range(world_size):
            (weights_on, rows_on), (weights_off, rows_off), (weights_again, rows_again) = results[rank][case]
            assert_same_bits(weights_on, weights_off)
            assert_same_bits(weights_on, weights_again)
            assert_same_bits(weights_on, results[0][case][0][0])
            assert rows_on == rows_off == rows_again
            assert [row[1:] for row in rows_on] == [row[1:] for row in results[0][case][0][1]]


def _gradients_beside_ddp(rank):
    trainer = Trainer(Options(accumulation=2))
    trainer.backward(1)
    trainer.reducer.finish()
    ours = {name: gradient.clone() for name, gradient in trainer.reducer.gradients().items()}

    ddp = DistributedDataParallel(ToyModel(), find_unused_parameters=True)
    with ddp.no_sync():
        (loss_of(ddp, tokens_of(1, 0, rank)) / 2).backward()
    (loss_of(ddp, tokens_of(1, 1, rank)) / 2).backward()
    theirs = {name: parameter.grad for name, parameter in ddp.module.named_parameters() if parameter.requires_grad}

    whole = ToyModel()
    batch = torch.cat([tokens_of(1, micro_batch, r) for micro_batch in (0, 1) for r in range(dist.get_world_size())])
    loss_of(whole, batch).backward()
    alone = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.requires_grad}
    return ours, theirs, alone


@pytest.mark.parametrize("world_size", [2, 4])
def test_contract_02_same_as_torch_ddp_and_as_one_process(world_size):
    for ours, theirs, alone in run_ranks(world_size, _gradients_beside_ddp):
        for name, gradient in ours.items():
            for other in (theirs[name], alone[name]):
                expected = torch.zeros_like(gradient) if other is None else other
                torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7, msg=f"gradient of {name}")


def _one_rank(rank):
    plain = ToyModel()
    (loss_of(plain, tokens_of(1, 0, 0)) / 2).backward()
    (loss_of(plain, tokens_of(1, 1, 0)) / 2).backward()
    before = dict(plain.named_parameters())

    trainer = Trainer(Options(accumulation=2))
    hooks_before = {name: len(p._post_accumulate_grad_hooks or {}) for name, p in trainer.model.named_parameters()}
    trainer.backward(1)
    trainer.reducer.finish()
    gradients = trainer.reducer.gradients()
    same = all(
        torch.equal(gradients[name], before[name].grad if before[name].grad is not None else torch.zeros(5))
        for name in gradients
    )
    return same, sum(hooks_before.values()), len(trainer.reducer.collectives)


def test_contract_03_one_data_rank_has_no_hook_no_bucket_and_the_same_values():
    assert run_ranks(1, _one_rank) == [(True, 0, 0)]
