"""ZeRO 3 in the arguments: what reaches DeepSpeed, what is said, what is refused by name."""

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import deepspeed_config
from megatron.neox_arguments.arguments import load_flat
from tests.neox_arguments.examples import SMALL

STAGE_3 = {"zero_optimization": {"stage": 3}}


def _args(**settings):
    return load_flat({**SMALL, **STAGE_3, **settings}, world_size=4)


def _zero(**options):
    return {"zero_optimization": {"stage": 3, **options}}


def test_deepspeed_trains_in_the_precision_asked_for_and_accumulates_and_sends_in_fp32():
    config = deepspeed_config(_args(precision="bfloat16", gradient_clipping=0.7))
    assert config["zero_optimization"] == {"stage": 3, "overlap_comm": False}
    assert config["bf16"] == {"enabled": True} and "fp16" not in config
    assert config["gradient_clipping"] == 0.7
    assert config["data_types"] == {"grad_accum_dtype": "fp32"} and config["communication_data_type"] == "fp32"
    narrow = deepspeed_config(_args(precision="fp16", communication_data_type="bf16"))
    assert narrow["communication_data_type"] == "bf16" and narrow["fp16"]["enabled"]
    assert "fp16" not in deepspeed_config(_args()) and "bf16" not in deepspeed_config(_args())


def test_options_reach_deepspeed_as_they_are():
    options = {
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 1e6,
        "contiguous_gradients": False,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    assert deepspeed_config(_args(**_zero(**options)))["zero_optimization"] == {
        **options,
        "stage": 3,
        "overlap_comm": False,
    }


@pytest.mark.parametrize(
    ("settings", "overlaps"),
    [
        ({}, False),
        ({"overlap_grad_reduce": True}, True),
        (_zero(overlap_comm=True), True),
        ({"overlap_grad_reduce": True, **_zero(overlap_comm=True)}, True),
    ],
)
def test_the_flag_is_deepspeeds_overlap_comm_and_one_line_says_so(settings, overlaps):
    args = _args(**settings)
    assert deepspeed_config(args)["zero_optimization"]["overlap_comm"] is overlaps
    line = "ZeRO 3: gradients are reduced by DeepSpeed itself; overlap_grad_reduce sets its overlap_comm to "
    assert args.notices == (line + str(overlaps).lower(),)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ddp_bucket_size": 1000}, "ddp_bucket_size has no effect"),
        ({"prescale_gradients": False}, "prescale_gradients: false has no effect"),
        (_zero(allgather_partitions=True), "allgather_partitions have no effect"),
        (_zero(stage3_gather_16bit_weights_on_model_save=True), "stage3_gather_16bit_weights_on_model_save have no"),
    ],
)
def test_what_has_no_effect_is_said(settings, said):
    assert any(said in notice for notice in _args(**settings).notices)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipe_parallel_size": 2}, ["pipe_parallel_size: 2", "ZeRO 3"]),
        ({"model_parallel_size": 2}, ["model_parallel_size: 2", "ZeRO 3"]),
        ({"check_for_nan_in_grad": True}, ["check_for_nan_in_grad", "ZeRO 3"]),
        ({"average_in_collective": True}, ["average_in_collective", "ZeRO 3"]),
        ({"gradient_predivide_factor": 2.0}, ["gradient_predivide_factor: 2.0", "ZeRO 3"]),
        ({"overlap_grad_reduce": False, **_zero(overlap_comm=True)}, ["overlap_comm", "overlap_grad_reduce"]),
        (_zero(stage3_max_liveparameters=1), ["stage3_max_liveparameters"]),
        (_zero(reduce_bucket_size=0), ["reduce_bucket_size", "at least 1"]),
        (_zero(stage3_prefetch_bucket_size=-1), ["stage3_prefetch_bucket_size", "at least 0"]),
        (_zero(stage3_max_live_parameters="many"), ["stage3_max_live_parameters", "whole number"]),
        (_zero(cpu_offload=True), ["cpu_offload", "offload_optimizer: {device: cpu}"]),
        (_zero(offload_param={"device": "nvme"}), ["offload_param.device", "nvme"]),
        (_zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), ["offload_optimizer.ratio"]),
        (_zero(offload_optimizer={"pin_memory": 1}), ["offload_optimizer.pin_memory", "true or false"]),
        ({"zero_options": {"reduce_bucket_size": 1}}, ["zero_options", "zero_optimization"]),
        ({"deepspeed_extra_args": {"zero_force_ds_cpu_optimizer": True}}, ["zero_force_ds_cpu_optimizer"]),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings, words):
    with pytest.raises(ConfigError) as refused:
        _args(**settings)
    for word in words:
        assert word in str(refused.value)


def test_options_of_zero_3_say_nothing_with_zero_0_but_that_they_have_no_effect():
    args = load_flat({**SMALL, "zero_optimization": {"stage": 0, "reduce_bucket_size": 5}}, world_size=4)
    assert "zero_optimization" not in deepspeed_config(args)
    assert len(args.notices) == 1 and "reduce_bucket_size" in args.notices[0]


def test_the_stage_may_have_its_flat_name_beside_options():
    settings = {**SMALL, "zero_stage": 3, "zero_optimization": {"reduce_bucket_size": 5}}
    zero = deepspeed_config(load_flat(settings, world_size=4))["zero_optimization"]
    assert zero == {"stage": 3, "reduce_bucket_size": 5, "overlap_comm": False}
