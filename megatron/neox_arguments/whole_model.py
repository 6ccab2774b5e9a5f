"""Arguments of one process that has the whole model, from the configuration of a run of many.

What says how the model is divided stays: the padding of the vocabulary follows from it. What says how many processes
there are, and how they share a batch, is set aside: it need not fit one process, and changes nothing for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_SET_ASIDE: dict[str, int | None] = {
    "num_gpus": None,
    "num_nodes": None,
    "world_size": None,
    "data_parallel_size": None,
    "train_batch_size": None,
    "gradient_accumulation_steps": None,
    "train_micro_batch_size_per_gpu": 1,
}


def whole_model_overrides() -> list[str]:
    """Return the overrides to load files with, after all others, and with no world size."""
    return [f"{key}={json.dumps(value)}" for key, value in _SET_ASIDE.items()]


def with_whole_model(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same of `NeoXArgs.flat`."""
    return {**flat, **_SET_ASIDE}
