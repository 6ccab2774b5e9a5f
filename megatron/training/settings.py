"""From argument sections to what the engine, the optimizer and the loop are built with: one function a consumer."""

from __future__ import annotations

import torch

from megatron.checkpointing import save_iterations
from megatron.data_parallel.arithmetic import ReductionArithmetic
from megatron.engine.reduction_settings import DEFAULT_BUCKET_ELEMENTS, ReductionSettings
from megatron.monitor.device_peak import peak_tflops
from megatron.monitor.throughput import DecoderShape, Throughput, flops_per_token
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.model import GATED_ACTIVATIONS, ModelArgs
from megatron.neox_arguments.optimizer import OptimizerArgs
from megatron.neox_arguments.parallelism import ParallelismArgs
from megatron.optimizer.choice import UpdateRule
from megatron.optimizer.learning_rate import LearningRateSchedule
from megatron.optimizer.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from megatron.training.loop import Cadence

DTYPES = {"fp32": torch.float32, "bfloat16": torch.bfloat16, "fp16": torch.float16}


def reduction_settings(args: ParallelismArgs) -> ReductionSettings:
    """When and how gradients are reduced."""
    return ReductionSettings(
        overlap=args.overlap_grad_reduce,
        arithmetic=ReductionArithmetic(
            wire_dtype=DTYPES[args.grad_wire_dtype],
            prescale=args.prescale_gradients,
            predivide_factor=args.gradient_predivide_factor,
            average_in_collective=args.average_in_collective,
        ),
        zero_stage=args.zero_stage,
        bucket_elements=_bucket_elements(args),
        check_for_nan=args.check_for_nan_in_grad,
        num_proving_steps=args.prove_overlap_steps,
        overlap_param_gather=_overlaps_param_gather(args),
        delay_on_later_stages=args.delay_grad_reduce,
    )


def _overlaps_param_gather(args: ParallelismArgs) -> bool:
    return args.overlap_grad_reduce if args.overlap_param_gather is None else args.overlap_param_gather


def _bucket_elements(args: ParallelismArgs) -> int:
    """`ddp_bucket_size`, or what was measured to be best within the limits of `zero_optimization`."""
    if args.ddp_bucket_size is not None:
        return args.ddp_bucket_size
    return min(DEFAULT_BUCKET_ELEMENTS, args.zero_bucket_limit or DEFAULT_BUCKET_ELEMENTS)


def update_rule(args: OptimizerArgs) -> UpdateRule:
    """What the optimizer does with them."""
    return UpdateRule(
        name=args.optimizer_type,
        schedule=LearningRateSchedule(
            peak=args.lr,
            minimum=args.min_lr,
            warmup_updates=round(args.warmup * args.lr_decay_iters),
            decay_updates=args.lr_decay_iters,
            style=args.lr_decay_style,
        ),
        loss_scale=_loss_scale(args),
        max_norm=args.gradient_clipping,
        weight_decay=args.weight_decay,
        betas=args.betas,
        eps=args.eps,
        momentum=args.momentum,
    )


def _loss_scale(args: OptimizerArgs) -> LossScale | None:
    if args.precision != "fp16":
        return None
    if args.loss_scale:
        return ConstantLossScale(args.loss_scale)
    return DynamicLossScale(2.0**args.initial_scale_power, args.loss_scale_window, args.hysteresis, args.min_scale)


def cadence(args: NeoXArgs) -> Cadence:
    """When to log, evaluate, save and exit."""
    training, checkpoint = args.training, args.checkpoint
    return Cadence(
        train_iters=training.train_iters,
        log_interval=args.monitor.log_interval,
        eval_interval=training.eval_interval if training.eval_iters else None,
        save_iterations=save_iterations(
            training.train_iters,
            checkpoint_factor=checkpoint.checkpoint_factor,
            checkpoint_scale=checkpoint.checkpoint_scale,
            extra_save_iters=checkpoint.extra_save_iters,
        ),
        exit_interval=training.exit_interval,
    )


def throughput(args: NeoXArgs, device: torch.device) -> Throughput:
    """What one step is worth in tokens and FLOPs."""
    return Throughput(
        tokens_per_step=args.training.train_batch_size * args.model.seq_length,
        flops_per_token=flops_per_token(_decoder_shape(args.model)),
        num_devices=args.parallelism.world_size,
        peak_tflops=peak_tflops(args.monitor, device, DTYPES[args.optimizer.precision]),
    )


def _decoder_shape(args: ModelArgs) -> DecoderShape:
    return DecoderShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_kv_heads=args.num_kv_heads,
        intermediate_size=args.ffn_hidden_size,
        is_gated=args.activation in GATED_ACTIVATIONS,
        seq_length=args.seq_length,
        padded_vocab_size=args.padded_vocab_size,
    )
