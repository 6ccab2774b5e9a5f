from dataclasses import replace

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.monitor.series import training_series, validation_series
from megatron.monitor.tensorboard_sink import TensorBoardSink
from tests.monitor.examples import ONE_RANK_FP32, TRAINING, VALIDATION


def scalars(directory):
    """Tag to (step, value) pairs, as TensorBoard's own reader finds them."""
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboards_reader_finds_the_values(tmp_path):
    sink = TensorBoardSink(tmp_path, start_iteration=0)
    sink.training(TRAINING)
    sink.validation(VALIDATION)
    sink.close()
    expected = {**training_series(TRAINING), **validation_series(VALIDATION)}
    assert scalars(tmp_path) == {tag: [(10, float(np.float32(value)))] for tag, value in expected.items()}


def test_a_resumed_run_replaces_the_part_it_repeats(tmp_path):
    first = TensorBoardSink(tmp_path, start_iteration=0)
    for iteration in (1, 2, 3):
        first.training(replace(ONE_RANK_FP32, iteration=iteration, lm_loss=1.0))
    first.close()
    resumed = TensorBoardSink(tmp_path, start_iteration=2)
    resumed.training(replace(ONE_RANK_FP32, iteration=3, lm_loss=2.0))
    resumed.close()
    assert scalars(tmp_path)["train/lm_loss"] == [(1, 1.0), (2, 1.0), (3, 2.0)]
