"""NeoX arguments that are known but not implemented, and those that change nothing here.

An argument of the first kind may be set to its default and is refused otherwise; one of the second kind is accepted,
with a notice when it is set to other than its default. Nothing is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.neox_arguments.yaml_values import Kind

LATER = "to come"
MOE = "mixture of experts is not supported here yet"
FAMILY = "only the transformer is supported here yet, not Mamba, RWKV or gMLP"
POST_TRAINING = "only pretraining is supported here yet, not fine-tuning on preferences or rewards"
KERNELS = "Transformer Engine's kernels are not supported here yet"
MUP = "maximal update parametrisation is not supported here yet"
COMET = "Comet is not supported here yet; metrics go to metrics.jsonl, TensorBoard and Weights & Biases"
DEEPSPEED = "this part of DeepSpeed is not supported here yet"


class Unsupported(NamedTuple):
    """A known NeoX argument: its type there, its default, and why no other value is accepted."""

    type: str
    default: Any
    reason: str


class Hint(NamedTuple):
    """An argument that changes nothing here: its kind of value, NeoX's default, and why it changes nothing."""

    kind: Kind
    default: Any
    reason: str


class PartlySupported(NamedTuple):
    """An argument of which some values change nothing here, and the others are refused.

    `changes_nothing` tells them apart; the rest is as in `Hint`.
    """

    changes_nothing: Callable[[Any], bool]
    default: Any
    reason: str


UNSUPPORTED: dict[str, Unsupported] = {
    "rpe_num_buckets": Unsupported("int", 32, LATER),
    "rpe_max_distance": Unsupported("int", 128, LATER),
    "sparsity_config": Unsupported("dict", None, LATER),
    "num_unique_layers": Unsupported("int", None, LATER),
    "param_sharing_style": Unsupported("str", "grouped", LATER),
    "fp16_lm_cross_entropy": Unsupported("bool", False, LATER),
    "apply_query_key_layer_scaling": Unsupported("bool", False, LATER),
    "gmlp_attn_dim": Unsupported("int", 64, FAMILY),
    "soft_prompt_tuning": Unsupported("dict", None, POST_TRAINING),
    "mamba_selective_scan_fusion": Unsupported("bool", False, FAMILY),
    "mamba_causal_conv_fusion": Unsupported("bool", False, FAMILY),
    "mamba_inner_func_fusion": Unsupported("bool", False, FAMILY),
    "mamba_selective_fp32_params": Unsupported("bool", True, FAMILY),
    "mamba_use_bias_in_conv": Unsupported("bool", True, FAMILY),
    "mamba_use_bias_in_linears": Unsupported("bool", False, FAMILY),
    "output_layer_parallelism": Unsupported("Literal['column']", "column", LATER),
    "serve_model_weights": Unsupported("bool", False, POST_TRAINING),
    "weight_server_port": Unsupported("Union[int, List[int]]", 6000, POST_TRAINING),
    "online_dataserver_ips": Unsupported("Union[str, List[str]]", "localhost", POST_TRAINING),
    "online_dataserver_ports": Unsupported("Union[int, List[int]]", 10000, POST_TRAINING),
    "te_columnparallel": Unsupported("bool", False, KERNELS),
    "te_rowparallel": Unsupported("bool", False, KERNELS),
    "te_layernorm_mlp": Unsupported("bool", False, KERNELS),
    "te_mha": Unsupported("bool", False, KERNELS),
    "te_fp8_wgrad": Unsupported("bool", True, KERNELS),
    "te_fp8_amax_history_len": Unsupported("int", 1, KERNELS),
    "te_fp8_amax_compute_algo": Unsupported("str", "most_recent", KERNELS),
    "te_fp8_margin": Unsupported("int", 0, KERNELS),
    "te_fp8_mha": Unsupported("bool", False, KERNELS),
    "dim_att": Unsupported("int", None, FAMILY),
    "head_size": Unsupported("int", None, FAMILY),
    "ffn_dim": Unsupported("int", None, FAMILY),
    "use_bnb_optimizer": Unsupported("bool", False, LATER),
    "use_checkpoint_lr_scheduler": Unsupported("bool", False, LATER),
    "wandb_init_all_ranks": Unsupported("bool", False, LATER),
    "use_comet": Unsupported("bool", None, COMET),
    "comet_workspace": Unsupported("Optional[str]", None, COMET),
    "comet_project": Unsupported("Optional[str]", None, COMET),
    "comet_experiment_name": Unsupported("Optional[str]", None, COMET),
    "comet_tags": Unsupported("Optional[list]", None, COMET),
    "comet_others": Unsupported("Optional[dict]", None, COMET),
    "comet_experiment": Unsupported("Any", None, COMET),
    "log_grad_pct_zeros": Unsupported("bool", False, LATER),
    "log_param_norm": Unsupported("bool", False, LATER),
    "log_optimizer_states": Unsupported("bool", False, LATER),
    "log_gradient_noise_scale": Unsupported("bool", False, LATER),
    "gradient_noise_scale_n_batches": Unsupported("int", 5, LATER),
    "gradient_noise_scale_cpu_offload": Unsupported("bool", False, LATER),
    "memory_profiling": Unsupported("bool", False, LATER),
    "memory_profiling_path": Unsupported("str", None, LATER),
    "profile": Unsupported("bool", False, LATER),
    "profile_step_start": Unsupported("int", 10, LATER),
    "profile_step_stop": Unsupported("int", 12, LATER),
    "adlr_autoresume": Unsupported("bool", False, LATER),
    "adlr_autoresume_interval": Unsupported("int", 1000, LATER),
    "deepscale": Unsupported("bool", False, LATER),
    "deepscale_config": Unsupported("str", None, LATER),
    "use_shared_fs": Unsupported("bool", True, LATER),
    "train_label_data_paths": Unsupported("list", None, POST_TRAINING),
    "train_reward_data_paths": Unsupported("list", None, POST_TRAINING),
    "test_label_data_paths": Unsupported("list", None, POST_TRAINING),
    "test_reward_data_paths": Unsupported("list", None, POST_TRAINING),
    "valid_label_data_paths": Unsupported("list", None, POST_TRAINING),
    "valid_reward_data_paths": Unsupported("list", None, POST_TRAINING),
    "pos_train_data_paths": Unsupported("list", None, POST_TRAINING),
    "neg_train_data_paths": Unsupported("list", None, POST_TRAINING),
    "pos_train_label_data_paths": Unsupported("list", None, POST_TRAINING),
    "neg_train_label_data_paths": Unsupported("list", None, POST_TRAINING),
    "pos_valid_data_paths": Unsupported("list", None, POST_TRAINING),
    "neg_valid_data_paths": Unsupported("list", None, POST_TRAINING),
    "pos_valid_label_data_paths": Unsupported("list", None, POST_TRAINING),
    "neg_valid_label_data_paths": Unsupported("list", None, POST_TRAINING),
    "pos_test_data_paths": Unsupported("list", None, POST_TRAINING),
    "neg_test_data_paths": Unsupported("list", None, POST_TRAINING),
    "pos_test_label_data_paths": Unsupported("list", None, POST_TRAINING),
    "neg_test_label_data_paths": Unsupported("list", None, POST_TRAINING),
    "pack_impl": Unsupported("Literal['packed', 'pack_until_overflow', 'unpacked']", "packed", LATER),
    "dataset_impl": Unsupported("Literal['gpt2', 'pairwise', 'online']", "gpt2", POST_TRAINING),
    "train_impl": Unsupported("Literal['normal', 'dpo', 'rm', 'kto', 'reinforce']", "normal", POST_TRAINING),
    "dpo_fp32": Unsupported("bool", True, POST_TRAINING),
    "dpo_reference_free": Unsupported("bool", False, POST_TRAINING),
    "dpo_beta": Unsupported("float", 0.1, POST_TRAINING),
    "kto_fp32": Unsupported("bool", True, POST_TRAINING),
    "kto_desirable_weight": Unsupported("float", 1.0, POST_TRAINING),
    "kto_undesirable_weight": Unsupported("float", 1.0, POST_TRAINING),
    "z_loss": Unsupported("float", 0.0, LATER),
    "kto_beta": Unsupported("float", 0.1, POST_TRAINING),
    "fp32_reinforce": Unsupported("bool", True, POST_TRAINING),
    "kl_impl": Unsupported("Literal['abs', 'mse', 'kl', 'full']", "mse", POST_TRAINING),
    "kl_div_beta": Unsupported("float", 0.1, POST_TRAINING),
    "reinforce_leave_one_out": Unsupported("bool", False, POST_TRAINING),
    "allow_chopped": Unsupported("bool", True, LATER),
    "s3_path": Unsupported("str", None, LATER),
    "s3_chunk_size": Unsupported("int", 104857600, LATER),
    "train_epochs": Unsupported("int", None, LATER),
    "checkpoint_in_cpu": Unsupported("bool", False, LATER),
    "char_level_ppl": Unsupported("bool", False, LATER),
    "use_mup": Unsupported("bool", False, MUP),
    "coord_check": Unsupported("bool", False, MUP),
    "save_base_shapes": Unsupported("bool", False, MUP),
    "base_shapes_file": Unsupported("str", None, MUP),
    "mup_init_scale": Unsupported("float", 1.0, MUP),
    "mup_attn_temp": Unsupported("float", 1.0, MUP),
    "mup_output_temp": Unsupported("float", 1.0, MUP),
    "mup_embedding_mult": Unsupported("float", 1.0, MUP),
    "mup_rp_embedding_mult": Unsupported("float", 1.0, MUP),
    "mup_width_scale": Unsupported("int", 2, MUP),
    "precompute_model_name": Unsupported("str", None, LATER),
    "eval_results_prefix": Unsupported("str", "", LATER),
    "eval_tasks": Unsupported("list", None, LATER),
    "moe_num_experts": Unsupported("int", 1, MOE),
    "moe_expert_interval": Unsupported("int", 1, MOE),
    "moe_top_k": Unsupported("int", 1, MOE),
    "moe_router_type": Unsupported("Literal['sinkhorn', 'topk']", "sinkhorn", MOE),
    "moe_lbl_in_fp32": Unsupported("bool", False, MOE),
    "moe_jitter_eps": Unsupported("float", None, MOE),
    "deepspeed": Unsupported("bool", True, LATER),
    "scheduler": Unsupported("dict", None, DEEPSPEED),
    "sparse_gradients": Unsupported("bool", False, DEEPSPEED),
    "amp": Unsupported("dict", None, DEEPSPEED),
    "curriculum_learning": Unsupported("dict", None, DEEPSPEED),
    "curriculum_seqlen": Unsupported("int", 0, DEEPSPEED),
    "autotuning": Unsupported("dict", None, DEEPSPEED),
    "activation_checkpointing": Unsupported("dict", None, DEEPSPEED),
    "sparse_attention": Unsupported("dict", None, DEEPSPEED),
    "data_efficiency": Unsupported("dict", None, DEEPSPEED),
    "tensorboard": Unsupported("dict", None, DEEPSPEED),
    "wandb": Unsupported("dict", None, DEEPSPEED),
    "csv_monitor": Unsupported("dict", None, DEEPSPEED),
    "elasticity": Unsupported("dict", None, DEEPSPEED),
    "compression_training": Unsupported("dict", None, DEEPSPEED),
    "checkpoint": Unsupported("dict", None, DEEPSPEED),
    "data_types": Unsupported("dict", None, DEEPSPEED),
    "autotuning_run": Unsupported("str", None, DEEPSPEED),
}

_SDPA = "attention runs through scaled_dot_product_attention, which chooses its kernel by itself"
_UNFUSED = "this fused kernel is not used here; the values are the same"
_LAUNCHER = "this is worked out at start"
_ZERO_BUCKETS = "gradient buckets are sized by ddp_bucket_size, with ZeRO 3 by zero_optimization.reduce_bucket_size"

HINTS: dict[str, Hint] = {
    "scaled_upper_triang_masked_softmax_fusion": Hint("bool", False, _SDPA),
    "scaled_masked_softmax_fusion": Hint("bool", False, _SDPA),
    "attention_softmax_in_fp32": Hint("bool", False, _SDPA),
    "bias_gelu_fusion": Hint("bool", False, _UNFUSED),
    "bias_dropout_fusion": Hint("bool", False, _UNFUSED),
    "rope_fusion": Hint("bool", False, _UNFUSED),
    "layernorm_fusion": Hint("bool", False, _UNFUSED),
    "rmsnorm_fusion": Hint("bool", False, _UNFUSED),
    "use_flashattn_swiglu": Hint("bool", False, _UNFUSED),
    "fused_kernels_build_path": Hint("str", None, _UNFUSED),
    "te_fp8_format": Hint("str", "hybrid", _UNFUSED),
    "rotary_save_freqs_buffer": Hint("bool", False, "rotary tables are never saved; they are computed from their base"),
    "use_cpu_initialization": Hint("bool", False, "starting weights do not depend on the device they are made on"),
    "synchronize_each_layer": Hint("bool", False, "recomputation never synchronises with the device"),
    "partition_activations": Hint("bool", False, "activations are partitioned over tensor ranks, and there is one"),
    "contiguous_checkpointing": Hint("bool", False, "activations to recompute from are kept as they are"),
    "deepspeed_activation_checkpointing": Hint("bool", True, "torch's own non-reentrant checkpoints are used"),
    "profile_backward": Hint("bool", False, "this only concerns DeepSpeed's activation checkpoints"),
    "override_lr_scheduler": Hint(
        "bool", False, "the schedule is always the configuration's, and goes on at the update that was reached"
    ),
    "checkpoint_validation_with_forward_pass": Hint(
        "bool", False, "every file of a checkpoint is compared with its checksum instead"
    ),
    "log_grad_norm": Hint("bool", False, "the gradient norm is always logged"),
    "zero_reduce_scatter": Hint("bool", None, _ZERO_BUCKETS),
    "zero_contiguous_gradients": Hint("bool", None, _ZERO_BUCKETS),
    "zero_reduce_bucket_size": Hint("int", None, _ZERO_BUCKETS),
    "zero_allgather_bucket_size": Hint("int", None, _ZERO_BUCKETS),
    "short_seq_prob": Hint("float", 0.1, "this only concerns masked language models"),
    "local_rank": Hint("int", None, _LAUNCHER),
    "rank": Hint("int", None, _LAUNCHER),
    "lazy_mpu_init": Hint("bool", False, _LAUNCHER),
    "global_num_gpus": Hint("int", None, _LAUNCHER),
    "user_script": Hint("str", None, _LAUNCHER),
    "config_files": Hint("dict", None, _LAUNCHER),
    "git_hash": Hint("str", None, _LAUNCHER),
    "onnx_safe": Hint("bool", False, "nothing is exported to ONNX"),
}

PARTLY_SUPPORTED: dict[str, PartlySupported] = {
    "attention_config": PartlySupported(lambda value: _is_plain_attention(value), None, _SDPA),
    "data_impl": PartlySupported(
        lambda value: value in ("infer", "mmap"), "infer", "token files are always memory-mapped"
    ),
    "dynamic_loss_scale": PartlySupported(
        lambda value: value is True, None, "the loss scale is dynamic unless loss_scale is set"
    ),
    "is_pipe_parallel": PartlySupported(lambda value: value is False, False, _LAUNCHER),
    "do_train": PartlySupported(lambda value: value is True, None, _LAUNCHER),
    "do_valid": PartlySupported(lambda value: value is True, None, _LAUNCHER),
    "do_test": PartlySupported(lambda value: value is True, None, _LAUNCHER),
}


def _is_plain_attention(value: Any) -> bool:
    """Whether a value is NeoX's `[[["flash"], 12]]`, with no kind of attention in it that sees other tokens."""
    try:
        return all({*kinds} <= {"flash", "global"} and (count == "all" or count >= 1) for kinds, count in value)
    except (TypeError, ValueError):
        return False
