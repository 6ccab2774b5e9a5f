"""Contract line 19: expert parameters have their own group, and their gradient does not depend on its size."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.data_parallel.grad_reducer import GradReducer
from megatron.data_parallel.partition import ReductionGroup, plan_buckets
from megatron.data_parallel.ready_order import complete_ready_order, record_ready_order
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

DATA, NUM_EXPERTS, WIDTH = 4, 4, 6
NUM_MICRO_BATCHES = 2


class _DenseAndExperts(nn.Module):
    """Dense layers beside those of all experts that this rank holds; every expert starts with its own weights."""

    def __init__(self, experts):
        super().__init__()
        self.dense = nn.ModuleList(_linear(100 + layer) for layer in range(3))
        self.experts = nn.ModuleDict({str(expert): _linear(expert) for expert in experts})

    def forward(self, own_tokens, tokens_by_expert):
        hidden, losses = own_tokens, []
        waiting = iter(tokens_by_expert.items())
        for layer in self.dense:
            hidden = torch.tanh(layer(hidden))
            # An expert after each dense layer, so that backward finishes both kinds in turns.
            losses += [self._loss(*sent) for sent in itertools.islice(waiting, 1)]
        return sum([*losses, *(self._loss(*sent) for sent in waiting)], hidden.square().sum())

    def _loss(self, expert, tokens):
        return torch.tanh(self.experts[expert](tokens)).square().sum()


def _linear(seed):
    layer = nn.Linear(WIDTH, WIDTH)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=generator)
    return layer


def _tokens(data_rank, micro_batch, expert):
    generator = torch.Generator().manual_seed(1000 * micro_batch + 10 * data_rank + expert)
    return torch.randn(3, WIDTH, generator=generator)


def _loss(model, rank, micro_batch, partners, experts):
    """What a rank computes: its own tokens in dense layers, and those of `partners` that were sent to its experts."""
    sent = {
        str(expert): torch.cat([_tokens(partner, micro_batch, expert) for partner in partners]) for expert in experts
    }
    return model(_tokens(rank, micro_batch, 99), sent) / NUM_MICRO_BATCHES


def _groups(rank, num_expert_ranks):
    """Return the group of dense parameters, that of this rank's experts, and the ranks that share out the experts."""
    world = ReductionGroup("data", DATA, DATA, rank, dist.group.WORLD)
    handles = [dist.new_group(list(range(first, DATA, num_expert_ranks))) for first in range(num_expert_ranks)]
    size = DATA // num_expert_ranks
    own = handles[rank % num_expert_ranks] if size > 1 else None
    first_partner = rank - rank % num_expert_ranks
    partners = range(first_partner, first_partner + num_expert_ranks)
    return world, ReductionGroup("expert", size, DATA, rank // num_expert_ranks, own), partners


def _reduce(rank, num_expert_ranks, zero_stage, overlap):
    """One step; return what this rank has of each average, and the launch order by group and bucket."""
    dense, expert, partners = _groups(rank, num_expert_ranks)
    held = NUM_EXPERTS // num_expert_ranks
    experts = range(rank % num_expert_ranks * held, (rank % num_expert_ranks + 1) * held)
    model = _DenseAndExperts(experts)
    parameters = dict(model.named_parameters())
    with record_ready_order(parameters) as seen:
        _loss(model, rank, 0, partners, experts).backward()
    plan = plan_buckets(
        complete_ready_order(seen, parameters),
        parameters,
        lambda name: expert if name.startswith("experts") else dense,
        bucket_elements=40,
        sharded=zero_stage >= 1,
    )
    reducer = GradReducer(
        parameters,
        plan,
        arithmetic=ReductionArithmetic(),
        overlap=overlap,
        scatter_every_backward=zero_stage == 2,
    )
    launched = []
    for bucket in reducer._buckets:
        real = bucket.launch
        bucket.launch = lambda bucket=bucket, real=real: (launched.append(bucket.plan.index), real())
    reducer.begin_step(NUM_MICRO_BATCHES)
    for micro_batch in range(NUM_MICRO_BATCHES):
        with reducer.backward_pass():
            _loss(model, rank, micro_batch, partners, experts).backward()
    in_backward = len(launched)
    reducer.finish()
    runs = {slot.name: bucket.run(slot) if bucket.sharded else None for bucket in plan.buckets for slot in bucket.slots}
    averages = {name: (runs[name], gradient.clone()) for name, gradient in reducer.gradients().items()}
    reducer.close()
    return averages, launched, in_backward, [(bucket.group.name, bucket.sharded) for bucket in plan.buckets]


WAYS = [(num_expert_ranks, zero_stage) for num_expert_ranks in (1, 2, 4) for zero_stage in (0, 1, 2)]


def _every_way(rank):
    return [[_reduce(rank, *way, overlap) for overlap in (True, False)] for way in WAYS]


def _one_process():
    """The average over data ranks of what each of them would compute if it held every expert."""
    model = _DenseAndExperts(range(NUM_EXPERTS))
    for rank in range(DATA):
        for micro_batch in range(NUM_MICRO_BATCHES):
            (_loss(model, rank, micro_batch, [rank], range(NUM_EXPERTS)) / DATA).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _whole(ranks, name, shape):
    """Put a gradient together from what ranks have of it; ranks that have the same elements have the same bits."""
    value = torch.full((shape.numel(),), float("nan"))
    for averages in ranks:
        run, gradient = averages.get(name, (range(0), torch.empty(0)))
        elements = slice(0, shape.numel()) if run is None else slice(run.start, run.stop)
        known = value[elements]
        assert torch.isnan(known).all() or torch.equal(known, gradient.flatten()), f"{name} differs between ranks"
        value[elements] = gradient.flatten()
    return value.view(shape)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(DATA, _every_way)


@pytest.mark.parametrize("way", WAYS, ids=[f"{ranks} expert ranks, ZeRO {stage}" for ranks, stage in WAYS])
def test_contract_19_expert_gradients_do_not_depend_on_the_number_of_expert_ranks(ranks, way):
    results = [rank[WAYS.index(way)] for rank in ranks]
    for name, expected in _one_process().items():
        on, off = (_whole([rank[mode][0] for rank in results], name, expected.shape) for mode in (0, 1))
        assert torch.equal(on, off), name
        torch.testing.assert_close(on, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("way", WAYS, ids=[f"{ranks} expert ranks, ZeRO {stage}" for ranks, stage in WAYS])
def test_contract_07_and_19_launches_over_both_groups_are_in_the_plans_order(ranks, way):
    for on, off in (rank[WAYS.index(way)] for rank in ranks):
        _, launched, in_backward, buckets = on
        # ZeRO 2 launches what it scatters in every backward, and everything else in the last, in one order.
        scattered = [index for index, (_, sharded) in enumerate(buckets) if sharded and way[1] == 2]
        assert launched == off[1] == [*scattered * (NUM_MICRO_BATCHES - 1), *range(len(buckets))]
        assert in_backward == len(launched) > off[2]
        groups = [group for group, _ in buckets]
        assert groups != sorted(groups) and groups != sorted(groups, reverse=True), "premise: the groups take turns"
