"""`overlap_param_gather`: gathers start after the update, and each part of the model waits for its own parameters."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.data_parallel.collective import shards_bytes_sent
from megatron.data_parallel.exposure import summarise
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import Options, Trainer, assert_same_bits, loss_of, tokens_of, train
from tests.model.small import decoder, model_args, tokens

pytestmark = pytest.mark.distributed


def _on_and_off(rank, stage, dtype):
    def run(overlap):
        options = Options(zero_stage=stage, dtype=dtype, accumulation=2, overlap_param_gather=overlap)
        return train(rank, options, 12)

    return run(True), run(False)


@pytest.mark.parametrize(("world_size", "stage", "dtype"), [(2, 1, torch.float32), (3, 2, torch.bfloat16)])
def test_gathering_under_forward_changes_no_bit(world_size, stage, dtype):
    ranks = run_ranks(world_size, _on_and_off, stage, dtype)
    for on, off in ranks:
        assert_same_bits(on[0], off[0])
        assert on[1] == off[1]
        assert_same_bits(on[0], ranks[0][0][0])


def _in_flight(trainer):
    """Which buckets have a gather that nobody has waited for."""
    return [bucket.plan.index for bucket in trainer.gather._buckets if bucket.collective._work is not None]


def _waits(rank):
    trainer = Trainer(Options(zero_stage=1, overlap_param_gather=True))
    bucket_of = {slot.name: bucket.index for bucket in trainer.plan.buckets for slot in bucket.slots}
    trainer.step(1)
    seen = {"after the update": _in_flight(trainer)}
    part_names = {part: name for name, part in trainer.model.named_modules()}
    for part in part_names:
        part.register_forward_pre_hook(lambda part, _: seen.update({part_names[part]: _in_flight(trainer)}))
    first = summarise(trainer.gather.collectives)
    trainer.step(2)
    second = summarise(trainer.gather.collectives)
    payload = sum(4 * bucket.num_elements for bucket in trainer.plan.buckets)
    return seen, bucket_of, first.bytes_sent, second.bytes_sent, shards_bytes_sent(payload, 2)


def test_each_part_waits_for_its_own_parameters_and_no_others():
    for seen, bucket_of, first, second, expected in run_ranks(2, _waits):
        assert seen.pop("after the update") == sorted(set(bucket_of.values())), "nothing was in flight"
        waited = set()
        for part, in_flight in seen.items():
            own = {bucket for name, bucket in bucket_of.items() if name.rpartition(".")[0] == part}
            waited |= own
            assert sorted(set(bucket_of.values()) - waited) == in_flight, f"when {part or 'the model'} ran"
        assert not in_flight
        assert (first, second) == (0, expected), "a step reports the gathers that its forward waited for"


def _read_between_steps(rank):
    trainer = Trainer(Options(zero_stage=2, overlap_param_gather=True))
    trainer.step(1)
    with torch.no_grad():
        evaluated = float(loss_of(trainer.model, tokens_of(9, 9, 0)))
    left = _in_flight(trainer)
    trainer.step(2)
    trainer.optimizer.close()
    hooks = [hook for part in trainer.model.modules() for hook in part._forward_pre_hooks.values()]
    return evaluated, left, _in_flight(trainer), hooks, trainer.weights()


def test_evaluation_waits_for_what_it_uses_and_closing_for_the_rest():
    first, second = run_ranks(2, _read_between_steps)
    for evaluated, left, after_close, hooks, weights in (first, second):
        assert evaluated == first[0], "ranks evaluated with different parameters"
        assert left == after_close == hooks == []
        assert_same_bits(weights, first[4])


class _FirstUses(TorchDispatchMode):
    """Notes the parameters that an operation takes before a part that holds them has run."""

    def __init__(self, model):
        super().__init__()
        self.names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
        self.too_early = []
        self.waited = set()
        for part in model.modules():
            own = [parameter.data_ptr() for parameter in part.parameters(recurse=False)]
            part.register_forward_pre_hook(lambda *_, own=own: self.waited.update(own))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.data_ptr() in self.names.keys() - self.waited:
                self.too_early.append(self.names[leaf.data_ptr()])
        return func(*args, **(kwargs or {}))


MODELS = [
    {"no_weight_tying": not tied, "pos_emb": position, "norm": norm, "checkpoint_activations": recompute}
    for tied, position, norm, recompute in itertools.product(
        (True, False), ("learned", "rotary"), ("layernorm", "rmsnorm"), (True, False)
    )
]
MODELS += [{"gpt_j_residual": True}, {"gpt_j_residual": True, "gpt_j_tied": True}, {"activation": "swiglu"}]


@pytest.mark.parametrize("fields", MODELS, ids=str)
def test_no_part_of_the_decoder_uses_a_parameter_before_one_that_holds_it_has_run(fields):
    model = decoder(model_args(**fields))
    with _FirstUses(model) as uses:
        model(tokens()).float().sum().backward()
    assert uses.too_early == []
    assert len(uses.names) == len(list(model.parameters()))
