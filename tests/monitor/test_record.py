import json
import math
from dataclasses import asdict, replace

import pytest

from megatron.monitor.record import ValidationRecord, to_json
from tests.monitor.examples import ONE_RANK_FP32, TRAINING, VALIDATION

TRAINING_KEYS = [
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "skipped",
    "step_time_s",
    "tokens_per_s",
    "tflops_per_device",
    "mfu",
    "grad_reduce_s",
    "exposed_grad_reduce_s",
    "hidden_fraction",
    "grad_reduce_bytes",
    "param_gather_s",
    "exposed_param_gather_s",
    "param_gather_bytes",
    "peak_memory_bytes",
]


def test_the_keys_are_the_interface_other_tools_rely_on():
    assert list(json.loads(to_json(TRAINING))) == TRAINING_KEYS
    assert list(json.loads(to_json(VALIDATION))) == ["iteration", "split", "lm_loss", "ppl"]


@pytest.mark.parametrize("record", [TRAINING, ONE_RANK_FP32, VALIDATION])
def test_a_row_reads_back_as_exactly_the_record(record):
    assert json.loads(to_json(record)) == asdict(record)


def test_losses_keep_every_bit():
    loss = math.nextafter(3.25, 4.0)
    assert json.loads(to_json(replace(TRAINING, lm_loss=loss)))["lm_loss"] == loss != 3.25


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_and_the_row_is_strict_json(value):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(to_json(replace(TRAINING, lm_loss=value, grad_norm=value)), parse_constant=refuse)
    assert row["lm_loss"] is None
    assert row["grad_norm"] is None
    assert row["learning_rate"] == 6e-4


def test_perplexity_of_a_loss():
    assert VALIDATION.ppl == math.exp(2.3)
    assert ValidationRecord.of_loss(1, "valid", 1e4).ppl == math.inf
    assert math.isnan(ValidationRecord.of_loss(1, "valid", math.nan).ppl)
