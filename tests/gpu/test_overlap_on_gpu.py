"""Contract lines 1 and 37 on an accelerator, through torch.accelerator: bits, streams, compiled graphs, no host waits.

With one device for both ranks gloo carries its tensors, since no accelerator's own backend lets two ranks share one.
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.optimizer.loss_scale import DynamicLossScale
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import Options, ToyModel, Trainer, assert_same_bits, loss_of, tokens_of

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
NUM_DEVICES = 0 if ACCELERATOR is None else torch.accelerator.device_count()
BACKEND = dist.get_default_backend_for_device(ACCELERATOR) if NUM_DEVICES > 1 else "gloo"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(ACCELERATOR is None, reason="needs an accelerator, and torch.accelerator finds none"),
]

WIDTH, NUM_BRANCHES = 1024, 3


def _device(rank):
    """This rank's device, made the current one, with kernels that repeat their bits."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.accelerator.set_device_index(rank % NUM_DEVICES)
    return torch.device(ACCELERATOR.type, rank % NUM_DEVICES)


def _trainer(device, options, model, loss=loss_of):
    scale = DynamicLossScale(2.0**8, window=2, hysteresis=1, minimum=1.0) if options.dtype is torch.float16 else None
    return Trainer(
        options,
        model=model.to(device),
        loss_scale=scale,
        loss_of=lambda model, tokens: loss(model, tokens.to(device, non_blocking=True)),
    )


def _train(trainer, num_steps):
    """Weights, and of each step (loss, norm, skipped), on the host."""
    rows = []
    for step in range(1, num_steps + 1):
        loss, outcome = trainer.step(step)
        rows.append((loss, float(outcome.grad_norm), float(outcome.skipped)))
    trainer.optimizer.settle()
    return {name: weight.cpu() for name, weight in trainer.weights().items()}, rows


def _on_and_off(rank, zero_stage):
    device = _device(rank)
    return [
        [
            _train(_trainer(device, Options(True, 3, dtype, zero_stage=zero_stage, tied=tied), ToyModel(tied=tied)), 6),
            _train(
                _trainer(device, Options(False, 3, dtype, zero_stage=zero_stage, tied=tied), ToyModel(tied=tied)), 6
            ),
        ]
        for dtype, tied in ((torch.float32, True), (torch.bfloat16, False), (torch.float16, False))
    ]


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_contract_01_and_37_on_equals_off_bit_for_bit_on_an_accelerator(zero_stage):
    results = run_ranks(2, _on_and_off, zero_stage, backend=BACKEND)
    for rank in results:
        for case, ((weights_on, rows_on), (weights_off, rows_off)) in enumerate(rank):
            assert rows_on == rows_off
            assert_same_bits(weights_on, weights_off)
            assert_same_bits(weights_on, results[0][case][0][0])
            assert all(0.0 < norm < float("inf") for _, norm, _ in rows_on)


class _Branches(nn.Module):
    """Branches that run, forward and so backward, each on a stream of its own, or all on the current one."""

    def __init__(self, streams, *, compiled):
        super().__init__()
        torch.manual_seed(8)
        self.branches = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
            for _ in range(NUM_BRANCHES)
        )
        self._streams = streams
        self._run = [torch.compile(branch) if compiled else branch for branch in self.branches]

    def forward(self, inputs):
        if self._streams is None:
            return sum(run(inputs) for run in self._run)
        current, total = torch.accelerator.current_stream(), 0.0
        for run, stream in zip(self._run, self._streams, strict=True):
            stream.wait_stream(current)
            with stream:
                output = run(inputs)
            current.wait_stream(stream)
            output.record_stream(current)
            total = total + output
        return total


def _branch_loss(model, tokens):
    generator = torch.Generator(tokens.device).manual_seed(3)
    inputs = torch.randn(64, WIDTH, generator=generator, device=tokens.device) * tokens.float().mean()
    weight = next(model.parameters())
    return model(inputs.to(weight.dtype)).float().square().mean()


def _on_streams(rank, compiled, zero_stage):
    device = _device(rank)
    runs = []
    for overlap, on_streams in ((True, True), (False, True), (True, False)):
        streams = [torch.Stream(device) for _ in range(NUM_BRANCHES)] if on_streams else None
        options = Options(overlap, 2, bucket_elements=3 * WIDTH * WIDTH, zero_stage=zero_stage, learning_rate=1e-4)
        runs.append(_train(_trainer(device, options, _Branches(streams, compiled=compiled), _branch_loss), 5))
    return runs


@pytest.mark.parametrize("zero_stage", [0, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_contract_37_gradients_from_several_streams_are_waited_for(compiled, zero_stage):
    for runs in run_ranks(2, _on_streams, compiled, zero_stage, backend=BACKEND, timeout_s=280):
        for weights, rows in runs[1:]:
            assert rows == runs[0][1]
            assert_same_bits(weights, runs[0][0])


def _steps_in_error_mode(rank, zero_stage, dtype):
    device = _device(rank)
    trainer = _trainer(device, Options(dtype=dtype, accumulation=2, zero_stage=zero_stage), ToyModel())
    batches = [tokens_of(step, 0, rank).to(device) for step in (1, 2, 3)]
    for batch in batches:
        # Whether the last update was skipped is what the host reads, once a step.
        trainer.optimizer.settle()
        torch.accelerator.synchronize()
        torch.cuda.set_sync_debug_mode("default" if batch is batches[0] else "error")
        trainer.reducer.begin_step(2)
        for _ in range(2):
            loss = trainer.loss_of(trainer.model, batch)
            with trainer.reducer.backward_pass():
                trainer.optimizer.scale_loss(loss).backward()
        trainer.reducer.finish()
        norm = trainer.optimizer.step().grad_norm
        torch.cuda.set_sync_debug_mode("default")
    return float(norm)


@pytest.mark.skipif(
    ACCELERATOR is None or ACCELERATOR.type != "cuda", reason="only torch.cuda tells when the host waits for the device"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_contract_37_the_host_does_not_wait_for_the_device_in_a_step(zero_stage, dtype):
    # gloo makes the host wait: with one device there is one rank, without anybody to reduce with.
    norms = run_ranks(2 if NUM_DEVICES > 1 else 1, _steps_in_error_mode, zero_stage, dtype, backend=BACKEND)
    assert all(0.0 < norm < float("inf") for norm in norms)
