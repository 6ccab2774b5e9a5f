"""A run's way into a checkpoint and out again: what the engine holds on one side, files on the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.checkpointing import (
    GridPosition,
    Holding,
    LoadOptions,
    ModelValues,
    ParallelSizes,
    RandomState,
    Retention,
    RunState,
    SaveRole,
    Snapshot,
    check_saved_model,
    load_checkpoint,
    model_values,
    save,
)
from megatron.engine.surface import Engine, EngineTensors
from megatron.model.decoder import Decoder
from megatron.mpu.grid import ParallelGrid
from megatron.mpu.tensor_parallel import parameter_placements
from megatron.neox_arguments.checkpoint import CheckpointArgs
from megatron.neox_arguments.model import ModelArgs
from megatron.optimizer.progress import OptimizerProgress
from megatron.training.state import TrainState

T = TypeVar("T")

_log = logging.getLogger(__name__)


def check_loadable(args: CheckpointArgs, model_args: ModelArgs, *, vocab_size: int) -> None:
    """Raise CheckpointError, before memory is spent on a model, if `load` holds one that this one cannot go on with."""
    if args.load is not None:
        values = model_values(model_args, vocab_size=vocab_size)
        check_saved_model(Path(args.load), values, options=_options(args), iteration=args.iteration)


@dataclass(frozen=True)
class Checkpoints:
    """Saves and loads one run. All ranks call every method, in the same order."""

    args: CheckpointArgs
    model_args: ModelArgs
    vocab_size: int
    decoder: Decoder
    engine: Engine
    grid: ParallelGrid
    device: torch.device

    def save(self, state: TrainState) -> Path | None:
        """Write a checkpoint of the present iteration; None, and nothing, where `save` is not set."""
        if self.args.save is None:
            return None
        progress, holding = self.engine.optimizer.progress, self._holding
        role = SaveRole.of_rank(
            dist.get_rank(), self.grid.world_size, holding.position, sharded_state=holding.shards is not None
        )
        with_optimizer = not self.args.no_save_optim
        tensors = self._by_model_names(
            self.engine.tensors_to_save(is_writer="weights" in role.writes, with_optimizer=with_optimizer)
        )
        snapshot = Snapshot(
            weights=tensors.weights,
            run_state=RunState(
                iteration=state.iteration,
                consumed_train_samples=state.consumed_train_samples,
                num_updates=progress.num_updates,
                skipped_iterations=progress.num_skipped,
                loss_scale=progress.loss_scale,
            ),
            optimizer_state=tensors.optimizer_state if with_optimizer else None,
            random_state=None if self.args.no_save_rng else RandomState.capture(),
            model=self._model_values,
            holding=holding,
        )
        retention = Retention(self.args.keep_last_n_checkpoints, frozenset(self.args.extra_save_iters or ()))
        directory = save(Path(self.args.save), snapshot, role=role, agree=self._agree, retention=retention)
        _log.info("saved %s", directory)
        return directory

    def load(self) -> tuple[TrainState, RandomState | None]:
        """Bring the engine to where the latest checkpoint under `load` left it, and say where that is.

        A fresh state if `load` is not set or holds nothing. The random state is for the caller to restore as the last
        thing before training.
        """
        if self.args.load is None:
            return TrainState(), None
        tensors = self._by_model_names(self.engine.tensors_to_load())
        loaded = load_checkpoint(
            Path(self.args.load),
            weights=tensors.weights,
            optimizer_state=tensors.optimizer_state,
            model=self._model_values,
            options=_options(self.args),
            holding=self._holding,
            iteration=self.args.iteration,
        )
        if loaded is None:
            _log.info("starting from scratch")
            return TrainState(), None
        run_state = loaded.run_state
        if not loaded.optimizer_restored:
            self.engine.optimizer.refresh_masters()
        self.engine.optimizer.restore_progress(
            OptimizerProgress(run_state.num_updates, run_state.skipped_iterations, run_state.loss_scale)
        )
        _log.info("loaded %s: going on after iteration %d", loaded.directory, run_state.iteration)
        return TrainState(run_state.iteration, run_state.consumed_train_samples), loaded.random_state

    @property
    def _model_values(self) -> ModelValues:
        return model_values(self.model_args, vocab_size=self.vocab_size)

    @property
    def _holding(self) -> Holding:
        """Which part of the whole model this rank holds."""
        names = self.decoder.model_names()
        grid, shards = self.grid, self.engine.optimizer.shards
        return Holding(
            position=GridPosition(
                grid.pipe.rank,
                grid.data.rank,
                grid.tensor.rank,
                ParallelSizes(grid.pipe.size, grid.tensor.size, grid.data.size),
            ),
            placements={names[name]: place for name, place in parameter_placements(self.decoder).items()},
            shards=None if shards is None else self._by_model_name(shards),
            layers=[int(index) for index in self.decoder.layers],
        )

    def _by_model_names(self, tensors: EngineTensors) -> EngineTensors:
        """Rename to the whole model's parameter names: the engine's begin with the module around the decoder."""
        return EngineTensors(self._by_model_name(tensors.weights), self._by_model_name(tensors.optimizer_state))

    def _by_model_name(self, by_engine_name: Mapping[str, T]) -> dict[str, T]:
        names = self.decoder.model_names()
        model_names = {id(parameter): names[name] for name, parameter in self.decoder.named_parameters()}
        trained = dict(self.engine.module.named_parameters())
        return {model_names[id(trained[name])]: value for name, value in by_engine_name.items()}

    def _agree(self, ok: bool) -> bool:
        """Whether all ranks say ok."""
        agreed = torch.tensor(float(ok), device=self.device)
        if self.grid.world_size > 1:
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return bool(agreed)


def _options(args: CheckpointArgs) -> LoadOptions:
    return LoadOptions(args.finetune, args.no_load_optim, args.no_load_rng)
