"""Put a run together, in the order in which each part needs the one before it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.checkpointing import RandomState
from megatron.data.build import Splits, SplitSizes, build_train_valid_test
from megatron.data.gpt_dataset import TokenDataset
from megatron.data.loader import MicroBatchLoader, MicroBatchOrder
from megatron.data.micro_batch import Collate, MicroBatch
from megatron.data.tokenization_record import check_tokenizer
from megatron.data_parallel.roll_call import RollCall
from megatron.engine.build import build_engine
from megatron.engine.stages import num_parameters, stage_specs
from megatron.engine.surface import Engine
from megatron.engine.zero3 import build_zero3_engine
from megatron.launch.environment import RankInfo
from megatron.model.decoder import Decoder, decoder_layers
from megatron.monitor.build import build_sinks
from megatron.monitor.interval import IntervalMeter
from megatron.mpu.grid import ParallelGrid, build_grid, warm_up
from megatron.mpu.tensor_parallel import NOT_SPLIT, TensorParallel
from megatron.neox_arguments import NeoXArgs, deepspeed_config
from megatron.neox_arguments.data import DataArgs
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training import settings
from megatron.training.checkpoints import Checkpoints, check_loadable
from megatron.training.evaluate import Evaluation
from megatron.training.join_ranks import JoinedRank, seed_random_streams
from megatron.training.language_model import LanguageModel
from megatron.training.loop import Loop
from megatron.training.signals import StopSignals
from megatron.training.state import TrainState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run that is ready to train. `random_state` is a resumed run's, to be restored right before the loop."""

    engine: Engine
    loop: Loop
    state: TrainState
    evaluation: Evaluation
    random_state: RandomState | None


def set_up(args: NeoXArgs, rank: RankInfo, joined: JoinedRank, signals: StopSignals) -> Run:
    """Build everything a run needs. Collective over all ranks.

    Raises ConfigError, DataError or CheckpointError with one message.
    """
    grid = build_grid(
        pipe_parallel_size=args.parallelism.pipe_parallel_size,
        model_parallel_size=args.parallelism.model_parallel_size,
        timeout=joined.timeout,
    )
    device = joined.device
    warm_up(grid, device)
    tokenizer = build_tokenizer(args.data.tokenizer_type, args.data.vocab_file, args.data.merge_file)
    _check_data_tokenizer(args.data, tokenizer)
    args = args.with_vocabulary(tokenizer.vocab_size)
    check_loadable(args.checkpoint, args.model, vocab_size=tokenizer.vocab_size)
    splits = _open_data(args, is_builder=rank.local_rank == 0)

    seed_random_streams(args.training.seed, data_rank=grid.data.rank, stage=grid.pipe.rank)
    model = _build_model(args, grid)
    engine = _build_engine(args, model, grid, joined.roll_call)
    checkpoints = Checkpoints(args.checkpoint, args.model, tokenizer.vocab_size, model.decoder, engine, grid, device)
    state, random_state = checkpoints.load()

    loader = _loaders(args, grid, tokenizer)
    sinks = build_sinks(
        args.monitor,
        is_rank_0=rank.rank == 0,
        start_iteration=state.iteration,
        total_iterations=args.training.train_iters,
        config=args.flat,
    )
    evaluation = Evaluation(
        engine, sinks, {"valid": _loader(loader, splits.valid), "test": _loader(loader, splits.test)}
    )
    meter = IntervalMeter(settings.throughput(args, device), device, num_skipped=engine.optimizer.progress.num_skipped)
    loop = Loop(
        engine=engine,
        micro_batches=_train_batches(loader, splits, state),
        train_batch_size=args.training.train_batch_size,
        cadence=settings.cadence(args),
        meter=meter,
        sinks=sinks,
        signals=signals,
        evaluate=lambda state: evaluation.run("valid", state.iteration),
        save=checkpoints.save,
    )
    return Run(engine, loop, state, evaluation, random_state)


def _check_data_tokenizer(data: DataArgs, tokenizer: Tokenizer) -> None:
    """Refuse data that another tokenizer made."""
    several = (data.train_data_paths, data.valid_data_paths, data.test_data_paths)
    for prefix in filter(None, [data.data_path, *(path for paths in several for path in paths or ())]):
        check_tokenizer(prefix, tokenizer)


def _open_data(args: NeoXArgs, *, is_builder: bool) -> Splits:
    batch, evaluated = args.training.train_batch_size, args.training.eval_iters
    return build_train_valid_test(
        args.data,
        seq_length=args.model.seq_length,
        seed=args.training.seed,
        num_samples=SplitSizes(args.training.train_iters * batch, evaluated * batch, evaluated * batch),
        is_builder=is_builder,
        wait=dist.barrier,
    )


def _build_model(args: NeoXArgs, grid: ParallelGrid) -> LanguageModel:
    """This rank's part of the decoder, in fp32; the whole's starting weights depend on the seed alone."""
    tensor_parallel = TensorParallel(
        grid.tensor.rank, grid.tensor.size, grid.tensor.handle, args.parallelism.sequence_parallel
    )
    whole = decoder_layers(args.model, seed=args.training.seed, tensor_parallel=NOT_SPLIT)
    _log.info("%.1f M parameters", sum(num_parameters(layer) for layer in whole if not layer.is_tied_head) / 1e6)
    layers = decoder_layers(args.model, seed=args.training.seed, tensor_parallel=tensor_parallel)
    mine = stage_specs(layers, args.parallelism.pipe_partition_method, stage=grid.pipe.rank, num_stages=grid.pipe.size)
    return LanguageModel(Decoder(mine), tensor_parallel)


def _build_engine(
    args: NeoXArgs, model: LanguageModel, grid: ParallelGrid, roll_call: RollCall | None = None
) -> Engine:
    if args.parallelism.zero_stage == 3:
        return build_zero3_engine(
            model,
            data_group=grid.data,
            deepspeed_config=deepspeed_config(args),
            update=settings.update_rule(args.optimizer),
        )
    return build_engine(
        model,
        grid=grid,
        deepspeed_config=deepspeed_config(args),
        dtype=settings.DTYPES[args.optimizer.precision],
        reduction=settings.reduction_settings(args.parallelism),
        update=settings.update_rule(args.optimizer),
        rehearsal_batch=_synthetic_batch(args),
        roll_call=roll_call,
    )


def _synthetic_batch(args: NeoXArgs) -> MicroBatch:
    """A micro-batch of the size that training uses, of random tokens."""
    shape = (args.training.train_micro_batch_size_per_gpu, args.model.seq_length)
    generator = torch.Generator().manual_seed(args.training.seed)
    tokens_BS = torch.randint(args.model.padded_vocab_size, shape, generator=generator)
    return MicroBatch(tokens_BS, tokens_BS, torch.ones(shape))


MakeLoader = Callable[[TokenDataset, int], MicroBatchLoader]


def _loaders(args: NeoXArgs, grid: ParallelGrid, tokenizer: Tokenizer) -> MakeLoader:
    """Return what makes this data rank's loader of a data set, from a number of consumed samples on."""
    collate = Collate(masked_input_token=tokenizer.eod if args.data.eod_mask_loss else None)

    def make(dataset: TokenDataset, consumed_samples: int) -> MicroBatchLoader:
        order = MicroBatchOrder(
            num_samples=len(dataset),
            consumed_samples=consumed_samples,
            micro_batch_size=args.training.train_micro_batch_size_per_gpu,
            data_rank=grid.data.rank,
            num_data_ranks=grid.data.size,
        )
        return MicroBatchLoader(
            dataset,
            order,
            collate=collate,
            num_workers=args.data.num_workers,
            vocab_size=args.model.padded_vocab_size,
        )

    return make


def _loader(make: MakeLoader, dataset: TokenDataset | None) -> MicroBatchLoader | None:
    return None if dataset is None else make(dataset, 0)


def _train_batches(make: MakeLoader, splits: Splits, state: TrainState) -> Iterator[MicroBatch]:
    assert splits.train is not None
    if state.consumed_train_samples >= len(splits.train):
        return iter(())
    return iter(make(splits.train, state.consumed_train_samples))
