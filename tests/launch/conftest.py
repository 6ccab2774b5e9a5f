"""A configuration for the tiny worker."""

import json

import pytest

from tests.launch.runs import ODD_PATH


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Folder with `odd name.yml`, whose values are hard to hand on, and `logs`."""
    folder = tmp_path_factory.mktemp("a folder")
    settings = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 32,
        "train_iters": 6,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "data_path": ODD_PATH,
        "maximum_tokens": 3,
    }
    (folder / "odd name.yml").write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
    return folder
