"""Checks and derived values, and every NeoX name."""

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from megatron.errors import ConfigError
from megatron.neox_arguments import deepspeed_config, load_flat, pad_vocab_size
from tests.neox_arguments.examples import SMALL, load


def _refused(*words, world_size=1, **changes):
    with pytest.raises(ConfigError) as error:
        load(world_size, **changes)
    for word in words:
        assert str(word) in str(error.value), f"{word!r} is not in: {error.value}"


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        ((None, 4, None), (8, 4, 1)),
        ((None, 4, 3), (24, 4, 3)),
        ((24, 4, None), (24, 4, 3)),
        ((24, None, 3), (24, 4, 3)),
        ((24, None, None), (24, 12, 1)),
        ((24, 4, 3), (24, 4, 3)),
    ],
)
def test_the_batch_is_solved_from_what_is_given(given, solved):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    training = load(2, **dict(zip(names, given, strict=True))).training
    values = tuple(getattr(training, name) for name in names)
    assert values == solved and all(type(value) is int for value in values)


def test_a_batch_that_does_not_divide_is_refused_with_its_numbers():
    _refused(25, 4, "data-parallel size 2", world_size=2, train_batch_size=25)
    _refused(16, 4, 3, world_size=2, train_batch_size=16, gradient_accumulation_steps=3)
    _refused("train_micro_batch_size_per_gpu", train_micro_batch_size_per_gpu=None)


def test_problems_of_every_kind_come_in_one_message_a_line_each():
    changes = {
        "layers_num": 2,
        "bias_gelu_fusion": "yes",
        "use_mup": True,
        "zero_optimization": {"stages": 1},
        "log_interval": 0,
        "num_attention_heads": 5,
        "min_lr": 5.0,
        "train_batch_size": 7,
        "checkpoint_factor": 1.5,
    }
    with pytest.raises(ConfigError) as error:
        load(**changes)
    lines = str(error.value).splitlines()
    for key in changes:
        assert sum(key in line for line in lines) == 1, f"{key}: {lines}"
    assert len(lines) == len(changes)


def test_unknown_keys_are_refused_with_the_nearest_names_all_at_once():
    _refused("num_layerz", "num_layers", "hiden_size", "hidden_size", num_layerz=2, hiden_size=3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", "two"),
        ("num_layers", 1.5),
        ("num_layers", True),
        ("num_layers", 0),
        ("num_layers", [1]),
        ("attention_dropout", 1.5),
        ("norm", "batchnorm"),
        ("overlap_grad_reduce", 1),
        ("split", 5),
        ("train_data_paths", "a"),
        ("log_interval", "often"),
        ("expansion_factor", float("inf")),
        ("expansion_factor", 1e308),
        ("checkpoint_factor", float("inf")),
        ("lr_decay_fraction", float("nan")),
        ("initial_scale_power", 128),
        ("num_nodes", 0),
        ("num_nodes", -2),
        ("master_port", 65536),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(key, value):
    _refused(key, repr(value), **{key: value})


@pytest.mark.parametrize("key", ["train_iters", "gradient_clipping", "lr_decay_fraction", "use_mup", "typo"])
@pytest.mark.parametrize("value", [10**400, 16**5000], ids=["400 digits", "6000 digits"])
def test_an_endless_number_is_refused_in_a_message_one_can_read(key, value):
    with pytest.raises(ConfigError, match=key) as error:
        load(**{key: value})
    assert len(str(error.value)) < 400


def test_whole_floats_are_taken_for_ints_and_ints_for_floats():
    args = load(train_iters=1e3, rotary_pct=1, pos_emb="rotary")
    assert args.training.train_iters == 1000 and type(args.training.train_iters) is int
    assert args.model.rotary_pct == 1.0


def test_a_missing_argument_is_named():
    _refused("num_layers is not set", num_layers=None)


@pytest.mark.parametrize(
    ("blocks", "precision"),
    [
        ({}, "fp32"),
        ({"precision": "bfloat16"}, "bfloat16"),
        ({"precision": "bf16"}, "bfloat16"),
        ({"fp16": {"enabled": True, "fp16": True, "loss_scale": 0}}, "fp16"),
        ({"fp16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, "bfloat16"),
        ({"bf16": {"enabled": True}, "precision": "bfloat16"}, "bfloat16"),
    ],
)
def test_precision_has_one_value_whichever_way_it_is_said(blocks, precision):
    assert load(**blocks).optimizer.precision == precision


def test_contradictions_between_two_ways_of_saying_a_thing_are_refused():
    _refused("precision", "fp16", "fp32", fp16={"enabled": True}, precision="fp32")
    _refused("lr", 6e-4, 0.1, lr=0.1)
    _refused("train_micro_batch_size_per_gpu", batch_size=7)
    _refused("zero_stage", zero_stage=0, zero_optimization={"stage": 1})
    _refused("fp32_allreduce", "communication_data_type", fp32_allreduce=True, communication_data_type="bf16")
    _refused("grad_wire_dtype", grad_wire_dtype="fp16")


def test_second_names_and_nested_values_end_in_their_fields():
    args = load(
        train_micro_batch_size_per_gpu=None,
        batch_size=3,
        clip_grad=0.5,
        optimizer={"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}},
        fp16={"enabled": True, "hysteresis": 5, "min_loss_scale": 2, "initial_scale_power": 8, "loss_scale_window": 9},
    )
    assert args.training.train_micro_batch_size_per_gpu == 3
    optimizer = args.optimizer
    assert (optimizer.gradient_clipping, optimizer.optimizer_type, optimizer.momentum) == (0.5, "sgd", 0.9)
    scale = (optimizer.hysteresis, optimizer.min_scale, optimizer.initial_scale_power, optimizer.loss_scale_window)
    assert scale == (5, 2.0, 8, 9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": {"type": "onebitadam", "params": {"lr": 1}}}, ["onebitadam"]),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1.0, "momentun": 0.9}}}, ["momentun", "betas"]),
        ({"optimizer": {"kind": "Adam"}}, ["kind"]),
        ({"optimizer": "Adam"}, ["optimizer", "nested"]),
        ({"fp16": {"enable": True}}, ["enable", "enabled"]),
        ({"zero_optimization": {"stage": 0, "stages": 1}}, ["stages"]),
        ({"zero_optimization": {"stage": 0, "cpu_offload": True}}, ["cpu_offload"]),
        ({"num_attention_heads": 5}, ["hidden_size 64", "num_attention_heads 5"]),
        ({"num_kv_heads": 3}, ["num_attention_heads 4", "num_kv_heads 3"]),
        ({"max_position_embeddings": 16}, ["seq_length 32", "16"]),
        ({"gpt_j_tied": True}, ["gpt_j_residual"]),
        ({"min_lr": 1.0}, ["min_lr", "lr"]),
        ({"lr_decay_iters": 10, "lr_decay_fraction": 0.5}, ["lr_decay_iters", "lr_decay_fraction"]),
        ({"checkpoint_factor": 1.5}, ["checkpoint_factor"]),
        ({"check_for_nan_in_grad": True, "precision": "fp16"}, ["check_for_nan_in_grad"]),
        *(
            ({"attention_config": [[[kind], 2]]}, ["attention_config", kind])
            for kind in ("sparse_fixed", "sparse_variable", "local", "bigbird", "bslongformer", "gmlp", "amlp")
        ),
        *(({"attention_config": [[[kind], 2]]}, ["attention_config", kind]) for kind in ("mamba", "rwkv")),
        ({"attention_config": [[["flash"], -5]]}, ["attention_config"]),
        ({"attention_config": "flash"}, ["attention_config"]),
        ({"is_pipe_parallel": True}, ["is_pipe_parallel"]),
        ({"do_train": False}, ["do_train"]),
        ({"do_valid": False}, ["do_valid"]),
        ({"do_test": False}, ["do_test"]),
        ({"pipe_partition_method": "junk"}, ["pipe_partition_method", "junk"]),
        ({"pipe_partition_method": "type:("}, ["pipe_partition_method", "type:("]),
        ({"data_impl": "cached"}, ["data_impl", "cached"]),
        ({"momentum": 0.9}, ["momentum", "adam"]),
        ({"eps": 1e-8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, ["eps", "sgd"]),
        ({"optimizer": {"type": "Adan", "params": {"lr": 0.1}}}, ["unknown optimizer", "Adan"]),
        ({"train_data_weights": [1.0]}, ["train_data_weights", "train_data_paths"]),
        ({"deepspeed_extra_args": {"zero_optimization": {"stage": 1}}}, ["deepspeed_extra_args", "zero_optimization"]),
        ({"deepspeed_extra_args": {"dump_state": True}, "dump_state": False}, ["dump_state", "deepspeed_extra_args"]),
        ({"fp16": {"enabled": True, "fp16": False}}, ["fp16.enabled", "fp16.fp16"]),
        ({"fp16": {"enabled": False}, "precision": "fp16"}, ["precision", "fp16.enabled"]),
        ({"bf16": {"enabled": False}, "precision": "bf16"}, ["precision", "bf16.enabled"]),
        ({"fp16": {"enabled": True, "fp16": "yes"}}, ["fp16.fp16", "'yes'", "true or false"]),
        ({"zero_optimization": {"stage": False}}, ["zero_optimization.stage", "False", "whole number"]),
        ({"zero_optimization": {"overlap_comm": 1, "reduce_bucket_size": "x"}}, ["overlap_comm", "reduce_bucket_size"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["offload_optimizer"]),
        ({"zero_stage": False}, ["zero_stage", "False"]),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, words):
    _refused(*words, **changes)


def test_processes_that_do_not_divide_are_refused_with_their_numbers():
    _refused(3, 2, world_size=3, model_parallel_size=2)
    _refused("pipe_parallel_size", 3, 2, world_size=3, pipe_parallel_size=2)
    _refused("data_parallel_size", 5, 2, world_size=2, data_parallel_size=5)


def test_more_stages_than_layers_are_refused_with_their_numbers():
    assert load(5, pipe_parallel_size=5, num_layers=2).parallelism.pipe_parallel_size == 5
    _refused("pipe_parallel_size 6", "num_layers 2", "5 layers", world_size=6, pipe_parallel_size=6, num_layers=2)


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:transformer|mlp", "type:Parallel.*Pipe"])
def test_every_partition_method_of_neox_is_taken(method):
    assert load(pipe_partition_method=method).parallelism.pipe_partition_method == method
    assert load().parallelism.pipe_partition_method == "type:transformer|mlp"


def test_a_run_without_a_world_size_takes_the_hosts_or_the_smallest_that_holds_the_model():
    assert load_flat(SMALL).parallelism.world_size == 1
    assert load_flat({**SMALL, "num_gpus": 3, "num_nodes": 2}).parallelism.world_size == 6
    assert load_flat({**SMALL, "world_size": 4}).parallelism.data_parallel_size == 4
    assert load_flat({**SMALL, "model_parallel_size": 2}).parallelism.world_size == 2
    _refused("-1", world_size=-1)


@pytest.mark.parametrize("size", [0, 1])
def test_pipe_parallel_size_0_and_1_are_the_same(size):
    args = load(pipe_parallel_size=size)
    assert args.parallelism.pipe_parallel_size == 1
    assert args.model_copy(update={"flat": {}, "origins": {}}) == load().model_copy(update={"flat": {}, "origins": {}})


def test_widths_of_gated_mlps_are_those_of_the_public_models():
    llama = {"hidden_size": 4096, "num_attention_heads": 32, "activation": "swiglu", "intermediate_size": 32768}
    assert load(**llama, mlp_multiple_of=256).model.ffn_hidden_size == 11008
    mistral = {**llama, "intermediate_size": 14336, "num_kv_heads": 8}
    assert load(**mistral).model.ffn_hidden_size == 14336
    assert load().model.ffn_hidden_size == 256
    assert load(expansion_factor=3).model.ffn_hidden_size == 192
    assert load(activation="geglu", hidden_size=96, num_attention_heads=4).model.ffn_hidden_size == 256


def test_the_vocabulary_is_padded_for_every_tensor_rank():
    assert pad_vocab_size(50257, 128, 1) == 50304
    assert pad_vocab_size(50257, 128, 4) == 50688
    assert load().with_vocabulary(50257).model.padded_vocab_size == 50304
    assert load(padded_vocab_size=60000).with_vocabulary(50257).model.padded_vocab_size == 60000
    with pytest.raises(ConfigError, match="100"):
        load(padded_vocab_size=100).with_vocabulary(50257)


@pytest.mark.parametrize(
    ("changes", "wire"),
    [
        ({}, "fp32"),
        ({"communication_data_type": "bf16"}, "bfloat16"),
        ({"grad_reduce_in_fp32": False}, "bfloat16"),
        ({"grad_reduce_in_fp32": True}, "fp32"),
        ({"fp32_allreduce": True}, "fp32"),
    ],
)
def test_gradients_travel_in_fp32_unless_less_is_asked_for(changes, wire):
    assert load(precision="bfloat16", **changes).parallelism.grad_wire_dtype == wire


def test_the_decay_ends_with_training_unless_said_otherwise():
    assert load().optimizer.lr_decay_iters == 100
    assert load(lr_decay_fraction=0.8).optimizer.lr_decay_iters == 80
    assert load(lr_decay_iters=30).optimizer.lr_decay_iters == 30


def test_deepspeed_is_configured_as_a_shell():
    config = deepspeed_config(load(precision="fp16", gradient_accumulation_steps=3))
    assert config["train_micro_batch_size_per_gpu"] == 4 and config["gradient_accumulation_steps"] == 3
    assert not {"fp16", "bf16", "zero_optimization", "optimizer", "gradient_clipping"} & config.keys()
    extra = {"deepspeed_extra_args": {"comms_logger": {"enabled": True}}}
    assert deepspeed_config(load(**extra))["comms_logger"] == {"enabled": True}
    assert deepspeed_config(load(comms_logger={"enabled": True}))["comms_logger"] == {"enabled": True}


def test_arguments_are_frozen():
    args = load()
    with pytest.raises(ValidationError):
        args.model.num_layers = 3
    with pytest.raises(ValidationError):
        args.model = args.model


def test_workers_get_the_same_arguments_through_json():
    args = load(2, precision="bfloat16", train_data_paths=["a", "b"])
    again = load_flat(json.loads(json.dumps(args.flat)), world_size=2)
    assert again == args


def test_hints_of_the_wrong_type_are_refused_and_defaults_are_not_worth_a_line():
    _refused("rope_fusion", "true or false", rope_fusion="yes")
    _refused("zero_reduce_bucket_size", "whole number", zero_reduce_bucket_size=True)
    assert load(rope_fusion=False, pipe_partition_method="type:transformer|mlp", bias_gelu_fusion=None).notices == ()


def test_hints_that_change_nothing_are_noticed():
    args = load(bias_gelu_fusion=True, attention_config=[[["flash"], 2]])
    assert any("bias_gelu_fusion" in notice for notice in args.notices)
    assert any("attention_config" in notice for notice in args.notices)


def test_null_means_unset():
    assert load().model == load_flat({**SMALL, "num_kv_heads": None, "norm": None}).model
    assert load_flat({**SMALL, "eval_interval": None}).training.eval_interval is None
    assert (
        load_flat({**SMALL, "batch_size": None, "lr": None, "fp16": {"loss_scale": None}}).optimizer == load().optimizer
    )


def test_loading_arguments_imports_neither_torch_nor_numpy_nor_deepspeed():
    code = (
        "import sys, megatron.neox_arguments, megatron.launch.command_line, megatron.launch.local, deepy;"
        "print([name for name in ('torch', 'numpy', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
