"""Contract line 37 without an accelerator: which stream waits for which, on streams that only keep the books."""

import pytest
import torch
from torch import nn

from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.data_parallel.grad_reducer import GradReducer
from megatron.data_parallel.param_gather import ParameterGather
from megatron.data_parallel.partition import ReductionGroup, plan_buckets
from megatron.optimizer.global_norm import GlobalNorm
from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.optimizer.weights import cast_parameters, shard_weights
from tests.data_parallel.fake_streams import FakeDevice, FakeStream

META = torch.device("meta")
WIDTH, NUM_LAYERS, NUM_PASSES = 16, 6, 3
CASES = [
    pytest.param(stage, wire, backend, id=f"ZeRO {stage}, {wire}, {backend}")
    for stage in (0, 1, 2)
    for wire in (torch.float32, torch.bfloat16)
    for backend in ("of an accelerator", "gloo")
]


class _Update(torch.optim.Optimizer):
    """Takes down what its stream had seen when it was asked to update."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.0})
        self.seen = set()

    def step(self, closure=None):
        self.seen = set(FakeDevice.current.seen)
        FakeDevice.current.seen.add("update")


class _Step:
    """One step of three micro-batches whose gradients come from several streams, as of a compiled model's graphs."""

    def __init__(self, monkeypatch, stage, wire, backend, *, overlapped_gather=False):
        self.device = FakeDevice(monkeypatch, backend)
        self.model = model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=META) for _ in range(NUM_LAYERS)))
        self.producers = [FakeStream() for _ in range(3)]
        for index, (name, parameter) in enumerate(model.named_parameters()):
            parameter.register_hook(lambda _, index=index, name=name: self._produce(index % 3, name))
        named = dict(model.named_parameters())
        group = ReductionGroup("data", 4, 4, 0, object())
        plan = plan_buckets(
            list(reversed(named)), named, lambda _: group, bucket_elements=2 * WIDTH * WIDTH, sharded=stage > 0
        )
        self.names = [[slot.name for slot in bucket.slots] for bucket in plan.buckets]
        arithmetic = ReductionArithmetic(wire_dtype=wire)
        reducer = GradReducer(named, plan, arithmetic=arithmetic, overlap=True, scatter_every_backward=stage == 2)
        weights = cast_parameters(named, torch.float32)
        gather = ParameterGather(named, plan, overlapped_by=model if overlapped_gather else None)
        weights = shard_weights(weights, gather)
        self.update = _Update(list(weights.masters.values()))
        optimizer = MixedPrecisionOptimizer(
            weights,
            reducer,
            inner=self.update,
            schedule=LearningRateSchedule(1e-2, 0.0, 2, 100, "cosine"),
            loss_scale=None,
            max_norm=1.0,
            norm=GlobalNorm(META),
            gather=gather,
        )
        reducer.begin_step(NUM_PASSES)
        for self.micro_batch in range(NUM_PASSES):
            loss = model(torch.ones(2, WIDTH, device=META)).sum()
            with reducer.backward_pass():
                loss.backward()
            self.device.use(self.device.main)
        reducer.finish()
        self.reductions = list(self.device.works)
        optimizer.step()
        self.gathers = self.device.works[len(self.reductions) :]

    def _produce(self, stream, name):
        self.device.use(self.producers[stream])
        self.device.note(f"{name} of {self.micro_batch}")


@pytest.mark.parametrize(("stage", "wire", "backend"), CASES)
def test_contract_37_a_collective_waits_for_every_stream_that_wrote_into_its_bucket(monkeypatch, stage, wire, backend):
    step = _Step(monkeypatch, stage, wire, backend)
    assert all(len(names) > 2 for names in step.names[:-1]), "premise: a bucket is written from several streams"
    launches = [work for work in step.reductions if not work.name.startswith("all_gather")]
    sent_together = [range(NUM_PASSES)] if stage < 2 else [[micro_batch] for micro_batch in range(NUM_PASSES)]
    assert len(launches) == len(sent_together) * len(step.names)
    expected = [
        {f"{name} of {micro_batch}" for name in names for micro_batch in micro_batches}
        for micro_batches in sent_together
        for names in step.names
    ]
    for work, gradients in zip(launches, expected, strict=True):
        assert gradients <= work.seen_at_launch, f"{work.name} starts before {gradients - work.seen_at_launch}"


@pytest.mark.parametrize(("stage", "wire", "backend"), CASES)
def test_contract_37_the_update_waits_for_all_collectives_and_the_host_for_none(monkeypatch, stage, wire, backend):
    step = _Step(monkeypatch, stage, wire, backend)
    assert {work.name for work in step.reductions} <= step.update.seen
    # What is gathered is what the update made, and the next forward reads what was gathered.
    assert len(step.gathers) == (len(step.names) if stage else 0)
    for work in step.gathers:
        assert "update" in work.seen_at_launch and work.name in step.device.main.seen


def test_contract_37_each_part_of_the_next_forward_waits_for_the_gather_of_what_it_reads(monkeypatch):
    step = _Step(monkeypatch, 1, torch.float32, "gloo", overlapped_gather=True)
    assert len(step.gathers) == len(step.names) > 2
    assert not any(step.device.main in work.waited_on for work in step.gathers)
    of_parameter = {
        name: work.name for names, work in zip(reversed(step.names), step.gathers, strict=True) for name in names
    }
    seen = []
    for part in step.model:
        part.register_forward_pre_hook(lambda *_: seen.append(set(FakeDevice.current.seen)))
    step.model(torch.ones(2, WIDTH, device=META))
    for index, before_part in enumerate(seen):
        assert {of_parameter[f"{index}.weight"], of_parameter[f"{index}.bias"]} <= before_part
    assert of_parameter[f"{NUM_LAYERS - 1}.weight"] not in seen[0], "the first part waited for the last one's"


@pytest.mark.parametrize(("stage", "wire", "backend"), CASES)
def test_contract_37_what_a_collective_works_on_outlives_it(monkeypatch, stage, wire, backend):
    step = _Step(monkeypatch, stage, wire, backend)
    for work in step.device.works:
        # First waits the stream that marks the landing, at once; what backends keep alive they may let go then.
        assert len(work.waited_on) == 2 and work.waited_on[1] is step.device.main, work.name
        assert not work.lost_memory, f"{work.name} works on memory that was free before the main stream had waited"
