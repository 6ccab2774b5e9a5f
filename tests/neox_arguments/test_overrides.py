"""`--set` wins over the files, however they say it, and every value knows where it comes from."""

import json

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import load_args, load_flat
from megatron.neox_arguments.arguments import _SECTION_OF
from tests.neox_arguments.examples import SMALL


@pytest.fixture
def file(tmp_path):
    def write(**changes):
        path = tmp_path / "small.yml"
        path.write_text(json.dumps({**SMALL, **changes}, indent=1))
        return path

    return write


@pytest.mark.parametrize(
    ("in_the_file", "override", "section", "field", "value"),
    [
        ({"fp16": {"enabled": True}}, "precision=fp32", "optimizer", "precision", "fp32"),
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, "precision=fp16", "optimizer", "precision", "fp16"),
        ({"bf16": {"enabled": True}}, "fp16.enabled=true", "optimizer", "precision", "fp16"),
        ({"precision": "fp16"}, "bf16={enabled: true}", "optimizer", "precision", "bfloat16"),
        ({}, "lr=0.5", "optimizer", "lr", 0.5),
        ({"weight_decay": 0.1}, "optimizer.params.weight_decay=0.3", "optimizer", "weight_decay", 0.3),
        ({}, "optimizer={type: SGD, params: {lr: 2}}", "optimizer", "optimizer_type", "sgd"),
        ({"fp16": {"hysteresis": 4}}, "hysteresis=3", "optimizer", "hysteresis", 3),
        ({"fp16": {"min-loss-scale": 4}}, "fp16.min_loss_scale=8", "optimizer", "min_scale", 8.0),
        ({"zero_optimization": {"stage": 1}}, "zero_stage=0", "parallelism", "zero_stage", 0),
        ({"gradient_clipping": 1.0}, "clip_grad=0.5", "optimizer", "gradient_clipping", 0.5),
        ({}, "batch_size=7", "training", "train_micro_batch_size_per_gpu", 7),
        ({"fp16": None}, "fp16.enabled=true", "optimizer", "precision", "fp16"),
    ],
)
def test_an_override_wins_over_every_other_way_of_saying_it(file, in_the_file, override, section, field, value):
    args = load_args([file(**in_the_file)], overrides=[override], world_size=1)
    assert getattr(getattr(args, section), field) == value
    assert args.origins[field] == "--set"
    handed_over = load_flat(json.loads(json.dumps(args.flat)), world_size=1)
    assert getattr(handed_over, section) == getattr(args, section)


def test_switching_a_block_off_wins_too_and_leaves_the_default(file):
    args = load_args([file(precision="fp16")], overrides=["fp16={enabled: false}"])
    assert (args.optimizer.precision, args.origins["precision"]) == ("fp32", "default")


def test_the_last_override_wins():
    args = load_args([], overrides=[f"{key}={json.dumps(value)}" for key, value in SMALL.items()] + ["lr=1", "lr=2"])
    assert args.optimizer.lr == 2.0


def test_unsetting_one_way_leaves_the_other(file):
    args = load_args([file(lr=6e-4)], overrides=["lr=null"])
    assert args.optimizer.lr == 6e-4
    assert load_args([file(num_kv_heads=2)], overrides=["num_kv_heads=null"]).model.num_kv_heads == 4


@pytest.mark.parametrize("override", ["typo=&x [*x]", "deepspeed_extra_args=&x {a: *x}", "optimizer={lr: 1, lr: 2}"])
def test_a_value_that_is_none_is_refused(file, override):
    with pytest.raises(ConfigError, match="--set"):
        load_args([file()], overrides=[override])


def test_every_value_says_where_it_comes_from(tmp_path):
    path = tmp_path / "a.yml"
    path.write_text(
        "num_layers: 2\nhidden-size: 64\nnum_attention_heads: 4\nseq_length: 32\n"
        "optimizer:\n  type: Adam\n  params:\n    lr: 6e-4\n    eps: 1e-7\n"
        "train_iters: 100\nbatch_size: 4\nfp16: {enabled: true,\n  loss_scale: 8}\n"
    )
    args = load_args([path], overrides=["seed=7", "optimizer.params.eps=1e-8"])
    expected = {
        "num_layers": f"{path}:1",
        "hidden_size": f"{path}:2",
        "optimizer_type": f"{path}:6",
        "lr": f"{path}:8",
        "eps": "--set",
        "train_micro_batch_size_per_gpu": f"{path}:11",
        "precision": f"{path}:12",
        "loss_scale": f"{path}:13",
        "seed": "--set",
        "num_kv_heads": "derived",
        "ffn_hidden_size": "derived",
        "train_batch_size": "derived",
        "lr_decay_iters": "derived",
        "world_size": "derived",
        "norm": "default",
        "betas": "default",
    }
    assert {key: args.origins[key] for key in expected} == expected
    assert _SECTION_OF.keys() <= args.origins.keys()
    assert args.with_vocabulary(100).origins["padded_vocab_size"] == "derived"
