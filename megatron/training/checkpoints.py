"""A run's way into a checkpoint and out again: what the engine holds on one side, files on the other."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpointing import (
    LoadOptions,
    ModelValues,
    ParallelSizes,
    RandomState,
    Retention,
    RunState,
    SaveRole,
    Snapshot,
    load_checkpoint,
    model_values,
    save,
)
from megatron.engine.surface import Engine, EngineTensors
from megatron.model.decoder import Decoder
from megatron.mpu.grid import ParallelGrid
from megatron.neox_arguments.checkpoint import CheckpointArgs
from megatron.neox_arguments.model import ModelArgs
from megatron.optimizer.mixed_precision import OptimizerProgress
from megatron.training.state import TrainState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """Saves and loads one run. All ranks call every method, in the same order."""

    args: CheckpointArgs
    model_args: ModelArgs
    decoder: Decoder
    engine: Engine
    grid: ParallelGrid
    device: torch.device

    def save(self, state: TrainState) -> Path | None:
        """Write a checkpoint of the present iteration; None, and nothing, where `save` is not set."""
        if self.args.save is None:
            return None
        role = SaveRole.of_data_rank(dist.get_rank(), self.grid.world_size, self.grid.data.rank)
        progress = self.engine.optimizer.progress
        with_optimizer = not self.args.no_save_optim
        tensors = self._by_decoder_names(
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
            parallel_sizes=ParallelSizes(self.grid.pipe.size, self.grid.tensor.size, self.grid.data.size),
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
        tensors = self._by_decoder_names(self.engine.tensors_to_load())
        loaded = load_checkpoint(
            Path(self.args.load),
            weights=tensors.weights,
            optimizer_state=tensors.optimizer_state,
            model=self._model_values,
            options=LoadOptions(self.args.finetune, self.args.no_load_optim, self.args.no_load_rng),
            data_rank=self.grid.data.rank,
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
        return model_values(self.model_args)

    def _by_decoder_names(self, tensors: EngineTensors) -> EngineTensors:
        """Rename to the decoder's parameter names: the engine's begin with the module around it."""
        decoder_names = {id(parameter): name for name, parameter in self.decoder.named_parameters()}
        names = {name: decoder_names[id(parameter)] for name, parameter in self.engine.module.named_parameters()}
        return EngineTensors(
            {names[name]: weight for name, weight in tensors.weights.items()},
            {names[name]: state for name, state in tensors.optimizer_state.items()},
        )

    def _agree(self, ok: bool) -> bool:
        """Whether all ranks say ok."""
        agreed = torch.tensor(float(ok), device=self.device)
        if self.grid.world_size > 1:
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return bool(agreed)
