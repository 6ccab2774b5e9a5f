from dataclasses import asdict

from megatron.monitor.series import training_series, validation_series
from tests.monitor.examples import ONE_RANK_FP32, TRAINING, VALIDATION


def test_every_field_but_the_iteration_has_one_curve():
    series = training_series(TRAINING)
    assert {name.split("/")[1]: value for name, value in series.items()} == {
        name: value for name, value in asdict(TRAINING).items() if name != "iteration"
    }


def test_what_does_not_apply_has_no_point():
    assert not [name for name in training_series(ONE_RANK_FP32) if name.startswith("communication/")]


def test_a_split_has_its_own_curves():
    assert validation_series(VALIDATION) == {"valid/lm_loss": VALIDATION.lm_loss, "valid/ppl": VALIDATION.ppl}
