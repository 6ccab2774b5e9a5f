import math
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.monitor.interval import IntervalMeter
from megatron.monitor.throughput import Throughput

CPU = torch.device("cpu")
THROUGHPUT = Throughput(tokens_per_step=1000, flops_per_token=10**9, num_devices=2, peak_tflops=None)


@dataclass(frozen=True)
class Times:
    in_flight_s: float
    exposed_s: float
    bytes_sent: int


@dataclass(frozen=True)
class Result:
    loss: torch.Tensor
    grad_norm: torch.Tensor | float | None = None
    learning_rate: float = 0.1
    loss_scale: float | None = None
    skipped: torch.Tensor | bool = False
    grad_reduce: Times | None = None
    param_gather: Times | None = None


def result(loss, **others):
    return Result(loss=torch.tensor(loss), **others)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def run(meter, clock, results, *, step_s=2.0):
    for one in results:
        clock.now_s += step_s
        meter.add(one)


def test_with_one_step_the_row_is_the_step(clock):
    meter = IntervalMeter(THROUGHPUT, CPU, clock=clock)
    times = Times(in_flight_s=0.8, exposed_s=0.2, bytes_sent=4096)
    loss = torch.tensor(1 / 3)
    run(
        meter, clock, [Result(loss, torch.tensor(2.5), 3e-4, 1024.0, torch.tensor(False), times, Times(0.6, 0.3, 2048))]
    )
    record = meter.end_interval(1)
    assert (record.iteration, record.lm_loss, record.grad_norm) == (1, loss.item(), 2.5)
    assert (record.learning_rate, record.loss_scale, record.skipped) == (3e-4, 1024.0, 0)
    assert (record.step_time_s, record.tokens_per_s, record.tflops_per_device) == (2.0, 500.0, 0.25)
    assert (record.grad_reduce_s, record.exposed_grad_reduce_s, record.grad_reduce_bytes) == (0.8, 0.2, 4096)
    assert record.hidden_fraction == pytest.approx(0.75)
    assert (record.param_gather_s, record.exposed_param_gather_s, record.param_gather_bytes) == (0.6, 0.3, 2048)
    assert record.mfu is None
    assert record.peak_memory_bytes > 1 << 20


def test_losses_and_norms_are_means_and_rate_and_scale_the_last(clock):
    meter = IntervalMeter(THROUGHPUT, CPU, clock=clock)
    losses = torch.tensor([3.0, 2.0, 1.3])
    run(
        meter,
        clock,
        [
            Result(loss, grad_norm=float(i), learning_rate=i / 10, loss_scale=2.0**i)
            for i, loss in enumerate(losses, start=1)
        ],
    )
    record = meter.end_interval(3)
    assert record.lm_loss == pytest.approx(losses.double().mean().item(), rel=1e-15)
    assert record.grad_norm == 2.0
    assert (record.learning_rate, record.loss_scale) == (0.3, 8.0)


def test_each_row_covers_its_own_interval(clock):
    meter = IntervalMeter(THROUGHPUT, CPU, clock=clock)
    run(meter, clock, [result(5.0)])
    meter.end_interval(1)
    run(meter, clock, [result(1.0), result(2.0)], step_s=0.5)
    record = meter.end_interval(3)
    assert (record.lm_loss, record.step_time_s) == (1.5, 0.5)


def test_a_loss_buffer_the_engine_uses_again_is_not_read_late(clock):
    meter = IntervalMeter(THROUGHPUT, CPU, clock=clock)
    buffer = torch.zeros(())
    for loss in (1.0, 3.0):
        meter.add(Result(buffer.fill_(loss)))
    clock.now_s += 1.0
    assert meter.end_interval(2).lm_loss == 2.0


def test_the_first_step_of_the_process_is_left_out_of_the_times(clock):
    meter = IntervalMeter(THROUGHPUT, CPU, clock=clock)
    slow, fast = Times(9.0, 9.0, 8), Times(0.5, 0.25, 8)
    run(meter, clock, [result(1.0, grad_reduce=slow)], step_s=30.0)
    run(meter, clock, [result(1.0, grad_reduce=fast)] * 3)
    record = meter.end_interval(4)
    assert (record.step_time_s, record.grad_reduce_s, record.hidden_fraction) == (2.0, 0.5, 0.5)
    run(meter, clock, [result(1.0)] * 2, step_s=3.0)
    assert meter.end_interval(6).step_time_s == 3.0


def test_a_first_step_alone_in_its_interval_is_timed(clock):
    meter = IntervalMeter(THROUGHPUT, CPU, clock=clock)
    run(meter, clock, [result(1.0)], step_s=30.0)
    assert meter.end_interval(1).step_time_s == 30.0


def test_evaluation_and_checkpoints_are_no_steps_time(clock):
    meter = IntervalMeter(THROUGHPUT, CPU, clock=clock)
    with meter.excluded():
        clock.now_s += 50.0
    run(meter, clock, [result(1.0)], step_s=10.0)
    run(meter, clock, [result(1.0)] * 2)
    with pytest.raises(KeyboardInterrupt), meter.excluded():
        clock.now_s += 70.0
        raise KeyboardInterrupt
    assert meter.end_interval(3).step_time_s == 2.0


def test_skipped_steps_are_counted_over_the_run_and_left_out_of_the_means(clock):
    meter = IntervalMeter(THROUGHPUT, CPU, num_skipped=5, clock=clock)
    skipped = Result(torch.tensor(math.inf), torch.tensor(math.nan), skipped=torch.tensor(True))
    applied = Result(torch.tensor(2.0), torch.tensor(1.0), skipped=torch.tensor(False))
    run(meter, clock, [skipped, applied, skipped])
    record = meter.end_interval(3)
    assert (record.lm_loss, record.grad_norm, record.skipped) == (2.0, 1.0, 7)
    run(meter, clock, [skipped])
    record = meter.end_interval(4)
    assert (record.lm_loss, record.skipped, meter.num_skipped) == (math.inf, 8, 8)


def test_without_communication_or_norm_the_fields_do_not_apply(clock):
    meter = IntervalMeter(THROUGHPUT, CPU, clock=clock)
    run(meter, clock, [result(1.0)] * 2)
    record = meter.end_interval(2)
    assert record.grad_norm is None
    assert record.grad_reduce_s is record.exposed_grad_reduce_s is record.hidden_fraction is None
    assert record.grad_reduce_bytes is None
    assert record.param_gather_s is record.exposed_param_gather_s is record.param_gather_bytes is None


def test_a_reduction_nothing_hides_has_fraction_zero(clock):
    meter = IntervalMeter(THROUGHPUT, CPU, clock=clock)
    run(meter, clock, [result(1.0, grad_reduce=Times(0.5, 0.5001, 8))])
    assert meter.end_interval(1).hidden_fraction == 0.0


def test_an_interval_without_steps_is_refused(clock):
    with pytest.raises(ValueError, match="iteration 7"):
        IntervalMeter(THROUGHPUT, CPU, clock=clock).end_interval(7)


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_from_the_device(clock):
    meter = IntervalMeter(THROUGHPUT, CPU, clock=clock)
    step = Result(torch.tensor(1.0), torch.tensor(1.0), skipped=torch.tensor(False))
    with HostReads() as reads:
        assert bool(torch.tensor(True))
        assert reads.count == 1
        run(meter, clock, [step] * 5)
        assert reads.count == 1


def test_an_accelerator_is_waited_for_at_the_ends_of_an_interval_only(clock, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    device = torch.device("cuda", 0)
    meter = IntervalMeter(THROUGHPUT, device, clock=clock)
    run(meter, clock, [result(1.0)])
    assert waits == [device] * 2  # the start, and once after the first step of the process
    run(meter, clock, [result(1.0)] * 8)
    assert len(waits) == 2
    meter.end_interval(9)
    assert len(waits) > 2
