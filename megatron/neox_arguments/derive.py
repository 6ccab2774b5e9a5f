"""Everything that follows from other arguments, worked out in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.errors import ConfigError
from megatron.neox_arguments.checkpoint import CheckpointArgs
from megatron.neox_arguments.combinations import problems_of_combinations
from megatron.neox_arguments.data import DataArgs
from megatron.neox_arguments.deepspeed import check_extra_args
from megatron.neox_arguments.launch import LaunchArgs
from megatron.neox_arguments.model import GATED_ACTIVATIONS, ModelArgs
from megatron.neox_arguments.optimizer import PARAMS_OF, OptimizerArgs
from megatron.neox_arguments.parallelism import ParallelismArgs, WireDtype
from megatron.neox_arguments.section import DERIVED
from megatron.neox_arguments.tensor_split import problems_of_split
from megatron.neox_arguments.training import TrainingArgs
from megatron.neox_arguments.zero3 import problems_of_zero3

WorldSize = int | Callable[[LaunchArgs], int] | None


def derive(sections: Mapping[str, Any], world_size: WorldSize, problems: list[str]) -> dict[str, Any]:
    """Return the sections with their derived values, and add what does not fit together to `problems`.

    A section that is missing because it was refused is left out, and so is what follows from it.
    """
    derived = dict(sections)

    def work_out(name: str, rule: Callable[..., Any], *needed: Any) -> None:
        """Replace section `name` by what `rule` makes of what it needs; take it out when that does not work."""
        if None in needed:
            derived.pop(name, None)
            return
        try:
            derived[name] = rule(*needed)
        except ConfigError as error:
            problems.append(str(error))
            derived.pop(name, None)

    given = sections.get
    work_out("model", derive_model, given("model"))
    work_out("data", check_data, given("data"))
    work_out("checkpoint", check_checkpoint, given("checkpoint"))
    work_out("deepspeed", check_extra_args, given("deepspeed"))
    work_out("optimizer", derive_optimizer, given("optimizer"), given("training"))
    work_out("parallelism", _grid(world_size), given("parallelism"), given("optimizer"), given("launch"))
    work_out("training", derive_training, given("training"), derived.get("parallelism"))
    if "parallelism" in derived and "model" in derived:
        problems.extend(_problems_of_stages(derived["parallelism"].pipe_parallel_size, derived["model"].num_layers))
    if "parallelism" in derived:
        problems.extend(problems_of_combinations(derived["parallelism"], sections["optimizer"]))
        if "model" in derived:
            problems.extend(problems_of_split(derived["model"], derived["parallelism"]))
        if "deepspeed" in derived:
            problems.extend(problems_of_zero3(derived["parallelism"], derived["deepspeed"]))
    return derived


def _grid(world_size: WorldSize) -> Callable[[ParallelismArgs, OptimizerArgs, LaunchArgs], ParallelismArgs]:
    def rule(parallelism: ParallelismArgs, optimizer: OptimizerArgs, launch: LaunchArgs) -> ParallelismArgs:
        return derive_parallelism(parallelism, optimizer, _world_size(world_size, launch, parallelism))

    return rule


def _world_size(given: WorldSize, launch: LaunchArgs, parallelism: ParallelismArgs) -> int:
    if callable(given):
        return given(launch)
    if given is not None:
        if given < 1:
            raise ConfigError(f"a run has at least 1 process, not {given}")
        return given
    if launch.num_gpus is not None:
        return launch.num_gpus * max(launch.num_nodes, 1)
    return parallelism.world_size or max(parallelism.pipe_parallel_size, 1) * parallelism.model_parallel_size


def _problems_of_stages(num_stages: int, num_blocks: int) -> list[str]:
    num_layers = num_blocks + 3
    if num_stages <= num_layers:
        return []
    return [
        f"pipe_parallel_size {num_stages} is more than the {num_layers} layers there are to divide: embedding, "
        f"num_layers {num_blocks} blocks, final norm and head"
    ]


def pad_vocab_size(vocab_size: int, divisible_by: int, model_parallel_size: int) -> int:
    """Round a vocabulary up so that each tensor rank has an equal share, a multiple of `divisible_by`."""
    multiple = divisible_by * model_parallel_size
    return -(-vocab_size // multiple) * multiple


def derive_model(model: ModelArgs) -> ModelArgs:
    """Fill in head counts, widths and lengths. Raises ConfigError where they do not fit together."""
    num_kv_heads = model.num_kv_heads or model.num_attention_heads
    max_positions = model.max_position_embeddings or model.seq_length
    problems = [*_problems_of_heads(model, num_kv_heads)]
    if max_positions < model.seq_length:
        problems.append(f"seq_length {model.seq_length} is longer than max_position_embeddings {max_positions}")
    if model.gpt_j_tied and not model.gpt_j_residual:
        problems.append("gpt_j_tied needs gpt_j_residual: only side by side can attention and MLP share a norm")
    if problems:
        raise ConfigError("\n".join(problems))
    return model.model_copy(
        update={
            "num_kv_heads": num_kv_heads,
            "max_position_embeddings": max_positions,
            "ffn_hidden_size": model.ffn_hidden_size or _ffn_hidden_size(model),
        }
    )


def _problems_of_heads(model: ModelArgs, num_kv_heads: int) -> list[str]:
    problems = []
    head_dim, rest = divmod(model.hidden_size, model.num_attention_heads)
    if rest:
        problems.append(
            f"hidden_size {model.hidden_size} is not a multiple of num_attention_heads {model.num_attention_heads}"
        )
    elif model.pos_emb == "rotary" and int(head_dim * model.rotary_pct) % 2:
        problems.append(
            f"rotary_pct {model.rotary_pct} of a head of {head_dim} dims is not an even number of dims, which rotary "
            "rotates in pairs"
        )
    if model.num_attention_heads % num_kv_heads:
        problems.append(
            f"num_attention_heads {model.num_attention_heads} is not a multiple of num_kv_heads {num_kv_heads}"
        )
    return problems


def _ffn_hidden_size(model: ModelArgs) -> int:
    """Width between the two matrices of the MLP.

    Without a gate it is `intermediate_size`. With one, a third matrix is paid for by a narrower MLP: two thirds of
    `expansion_factor` x `hidden_size`, rounded up to `mlp_multiple_of` (Shazeer, GLU Variants Improve Transformer,
    2020). Public configurations give `intermediate_size` of a gated MLP in two ways: the width itself (Mistral 7B:
    14336), or, together with `mlp_multiple_of`, three times the width before rounding (LLaMA 7B: 32768 and 256 for
    11008).
    """
    width = model.intermediate_size or int((model.expansion_factor or 4.0) * model.hidden_size)
    if model.activation not in GATED_ACTIVATIONS or (model.intermediate_size and model.mlp_multiple_of == 1):
        return width
    narrowed = width // 3 if model.intermediate_size else width * 2 // 3
    return -(-narrowed // model.mlp_multiple_of) * model.mlp_multiple_of


def derive_parallelism(parallelism: ParallelismArgs, optimizer: OptimizerArgs, world_size: int) -> ParallelismArgs:
    """Fill in the grid's sizes and the dtype on the wire. Raises ConfigError, with numbers, where they do not fit."""
    if "grad_wire_dtype" in parallelism.model_fields_set:
        raise ConfigError("grad_wire_dtype is derived: set communication_data_type")
    stages = max(parallelism.pipe_parallel_size, 1)
    model_ranks = stages * parallelism.model_parallel_size
    if world_size % model_ranks:
        raise ConfigError(
            f"{world_size} processes cannot be divided into pipe_parallel_size {stages} x model_parallel_size "
            f"{parallelism.model_parallel_size} = {model_ranks} for each copy of the model"
        )
    data_parallel_size = world_size // model_ranks
    for name, value, derived in (
        ("world_size", parallelism.world_size, world_size),
        ("data_parallel_size", parallelism.data_parallel_size, data_parallel_size),
    ):
        if value not in (DERIVED, derived):
            raise ConfigError(f"{name} is set to {value}, but this run has {derived}")
    return parallelism.model_copy(
        update={
            "pipe_parallel_size": stages,
            "world_size": world_size,
            "data_parallel_size": data_parallel_size,
            "grad_wire_dtype": _grad_wire_dtype(parallelism, optimizer),
        }
    )


def _grad_wire_dtype(parallelism: ParallelismArgs, optimizer: OptimizerArgs) -> WireDtype:
    """Return the dtype gradients travel in; fp32, which they are accumulated in, unless something else is asked for."""
    wanted: dict[str, WireDtype] = {}
    if parallelism.communication_data_type is not None:
        wanted[f"communication_data_type: {parallelism.communication_data_type}"] = parallelism.communication_data_type
    if parallelism.fp32_allreduce:
        wanted["fp32_allreduce: true"] = "fp32"
    if parallelism.grad_reduce_in_fp32 is not None:
        in_fp32 = parallelism.grad_reduce_in_fp32
        wanted[f"grad_reduce_in_fp32: {str(in_fp32).lower()}"] = "fp32" if in_fp32 else optimizer.precision
    if len(set(wanted.values())) > 1:
        raise ConfigError(f"{' and '.join(wanted)} ask for different dtypes of gradients on the wire")
    return next(iter(wanted.values()), "fp32")


def derive_training(training: TrainingArgs, parallelism: ParallelismArgs) -> TrainingArgs:
    """Solve train_batch_size = micro-batch x accumulation x data-parallel size for what is unset.

    Raises ConfigError with the numbers when they contradict each other or nothing gives the size of a batch.
    """
    batch = _Batch(
        training.train_batch_size, training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps
    )
    solved = batch.solve(parallelism.data_parallel_size)
    return training.model_copy(
        update={
            "train_batch_size": solved.total,
            "train_micro_batch_size_per_gpu": solved.micro,
            "gradient_accumulation_steps": solved.accumulation,
        }
    )


@dataclass(frozen=True)
class _Batch:
    """What was set; DERIVED where nothing was."""

    total: int
    micro: int
    accumulation: int

    def solve(self, data_parallel_size: int) -> _Batch:
        total, micro, accumulation = self.total, self.micro, self.accumulation
        if not total and not micro:
            raise ConfigError(
                "nothing gives the size of a batch: set train_micro_batch_size_per_gpu or train_batch_size"
            )
        if not total:
            accumulation = accumulation or 1
            total = micro * accumulation * data_parallel_size
        elif not micro:
            accumulation = accumulation or 1
            micro = total // (accumulation * data_parallel_size)
        elif not accumulation:
            accumulation = total // (micro * data_parallel_size)
        if not micro or not accumulation or micro * accumulation * data_parallel_size != total:
            raise ConfigError(
                f"train_batch_size {total} is not train_micro_batch_size_per_gpu "
                f"{self.micro or '(unset)'} x gradient_accumulation_steps "
                f"{self.accumulation or '(unset)'} x data-parallel size "
                f"{data_parallel_size}"
            )
        return _Batch(total, micro, accumulation)


def derive_optimizer(optimizer: OptimizerArgs, training: TrainingArgs) -> OptimizerArgs:
    """Fill in the length of the decay. Raises ConfigError where values contradict each other or have no use."""
    problems = [
        f"{key} is set, but {optimizer.optimizer_type} has none"
        for key in ("betas", "eps", "momentum")
        if key in optimizer.model_fields_set and key not in PARAMS_OF[optimizer.optimizer_type]
    ]
    if optimizer.lr_decay_iters and optimizer.lr_decay_fraction is not None:
        problems.append("lr_decay_iters and lr_decay_fraction both say how long the rate decays: set one of them")
    if optimizer.min_lr > optimizer.lr:
        problems.append(f"min_lr {optimizer.min_lr} is above lr {optimizer.lr}")
    if problems:
        raise ConfigError("\n".join(problems))
    fraction = 1.0 if optimizer.lr_decay_fraction is None else optimizer.lr_decay_fraction
    decay_iters = optimizer.lr_decay_iters or max(1, round(fraction * training.train_iters))
    return optimizer.model_copy(update={"lr_decay_iters": decay_iters})


def check_data(data: DataArgs) -> DataArgs:
    """Refuse weights of data that is not there; what depends on the data itself is checked where it is opened."""
    problems = [
        f"{split}_data_weights is set, but {split}_data_paths is not"
        for split in ("train", "valid", "test")
        if getattr(data, f"{split}_data_weights") and not getattr(data, f"{split}_data_paths")
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return data


def check_checkpoint(checkpoint: CheckpointArgs) -> CheckpointArgs:
    """Refuse a spacing of checkpoints that is none."""
    factor = checkpoint.checkpoint_factor
    if factor is None:
        return checkpoint
    if checkpoint.checkpoint_scale == "log" and factor <= 1:
        raise ConfigError(f"checkpoint_factor {factor} must be greater than 1 with checkpoint_scale log")
    if checkpoint.checkpoint_scale == "linear" and factor != int(factor):
        raise ConfigError(f"checkpoint_factor {factor} must be a whole number with checkpoint_scale linear")
    return checkpoint
