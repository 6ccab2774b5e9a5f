import math
from dataclasses import replace

import pytest

from megatron.monitor.console import duration, training_line, validation_line
from megatron.monitor.record import ValidationRecord
from tests.monitor.examples import ONE_RANK_FP32, TRAINING, VALIDATION


def test_the_line_of_an_fp16_run_with_communication():
    assert training_line(TRAINING, 1000) == (
        "iteration 10/1000 | loss 0.3000 | lr 6.00e-04 | norm 0.333 | 12,346 tokens/s | 0.0123 TFLOPS/device | "
        "MFU 45.7% | exposed 62.5 ms | hidden 88% | scale 65536 | skipped 2 | eta 20m38s"
    )


def test_what_does_not_apply_is_left_out():
    assert training_line(replace(ONE_RANK_FP32, grad_norm=None, tflops_per_device=412.3), 10) == (
        "iteration 10/10 | loss 0.3000 | lr 6.00e-04 | 12,346 tokens/s | 412 TFLOPS/device | eta 0s"
    )


def test_skipped_steps_show_in_any_precision_and_nan_shows_as_nan():
    line = training_line(replace(ONE_RANK_FP32, skipped=1, lm_loss=math.nan, grad_norm=math.inf), 10)
    assert "| skipped 1 |" in line
    assert "| loss nan |" in line
    assert "| norm inf |" in line


def test_the_line_of_an_evaluation():
    assert validation_line(VALIDATION, 1000) == "iteration 10/1000 | valid loss 2.3000 | ppl 9.97"
    assert validation_line(ValidationRecord.of_loss(5, "test", 1e4), 5).endswith("test loss 10000.0000 | ppl inf")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (3599.6, "1h00m"), (3 * 86400 + 7200, "3d02h"), (-1, "0s")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
