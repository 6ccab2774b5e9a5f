"""Bringing a checkpoint into a model: everything is checked before the first value changes."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from megatron.checkpointing import catalog
from megatron.checkpointing.assemble import WantedTensor, check_agreement, needed_pieces
from megatron.checkpointing.compare import check_optimizer, check_weights, model_differences
from megatron.checkpointing.file_names import STATE_FILE
from megatron.checkpointing.holding import Holding
from megatron.checkpointing.open_files import OpenFiles
from megatron.checkpointing.random_state import RandomState
from megatron.checkpointing.reader import CheckpointReader, RandomSource, open_checkpoint
from megatron.checkpointing.snapshot import ModelValues, OptimizerState, RunState
from megatron.checkpointing.targets import fill, state_targets, weight_targets
from megatron.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadOptions:
    """What of a checkpoint to take. `finetune` takes the weights only and starts at iteration 0."""

    finetune: bool = False
    no_load_optim: bool = False
    no_load_rng: bool = False

    @property
    def takes_optimizer_state(self) -> bool:
        """Whether optimizer, loss scale and learning-rate schedule go on where they were."""
        return not (self.finetune or self.no_load_optim)

    @property
    def takes_random_state(self) -> bool:
        """Whether the random number generators go on where they were."""
        return not (self.finetune or self.no_load_rng)


@dataclass(frozen=True)
class Loaded:
    """What came from a checkpoint besides the tensors.

    With `optimizer_restored` False, master weights must be rebuilt from the weights just loaded. `random_state` is for
    the caller to restore, as the last thing before training.
    """

    directory: Path
    run_state: RunState
    optimizer_restored: bool
    random_state: RandomState | None


def find_checkpoint(root: Path, iteration: int | None = None) -> CheckpointReader | None:
    """Open the latest checkpoint under `root`, or that of `iteration`.

    None if `root` holds no checkpoint and no iteration was asked for. CheckpointError, naming a complete one if there
    is any, if the one wanted is missing or incomplete.
    """
    directory = catalog.find_latest(root) if iteration is None else catalog.step_directory(root, iteration)
    if directory is None:
        return None
    try:
        return open_checkpoint(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_alternative(root, directory)}") from error


def check_saved_model(root: Path, model: ModelValues, *, options: LoadOptions, iteration: int | None = None) -> None:
    """Refuse the checkpoint that `load_checkpoint` would refuse for its `model` values, before a model is built."""
    reader = find_checkpoint(root, iteration)
    if reader is not None:
        model_differences(reader, model, finetune=options.finetune)


def load_checkpoint(
    root: Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer_state: OptimizerState | None = None,
    model: ModelValues | None = None,
    options: LoadOptions | None = None,
    holding: Holding | None = None,
    iteration: int | None = None,
) -> Loaded | None:
    """Copy a checkpoint into `weights` and `optimizer_state`, in place and bit for bit, and return the rest of it.

    None if there is nothing to load (`find_checkpoint`). `holding` says which part of the model this rank has (None:
    all); the run that saved may have parted it otherwise. Every check (files, checksums, `model` values, names, shapes)
    comes before the first copy; what does not fit raises CheckpointError with all differences in one message. Without
    `optimizer_state` no optimizer is restored, as for generation.
    """
    options, holding, model = options or LoadOptions(), holding or Holding(), model or {}
    reader = find_checkpoint(root, iteration)
    if reader is None:
        logger.info("no checkpoint under %s", root)
        return None
    takes_optimizer = options.takes_optimizer_state and optimizer_state is not None
    into_weights = weight_targets(weights, holding)
    for difference in model_differences(reader, model, finetune=options.finetune):
        logger.warning("%s", difference)
    check_weights(reader, [target.wanted for target in into_weights], model, holding)
    into_state = state_targets(optimizer_state or {}, weights, holding) if takes_optimizer else []
    if takes_optimizer:
        check_optimizer(reader, [target.wanted for target in into_state], holding)
    source = _random_source(reader, holding) if options.takes_random_state else None
    _check_files(root, reader, [target.wanted for target in (*into_weights, *into_state)], source)
    loaded = Loaded(
        directory=reader.directory,
        run_state=_run_state(reader, options),
        optimizer_restored=takes_optimizer,
        random_state=None if source is None else _random_state(reader, source, holding),
    )
    fill("weights", into_weights, reader)
    fill("optimizer state", into_state, reader)
    return loaded


def _check_files(root: Path, reader: CheckpointReader, wanted: list[WantedTensor], source: RandomSource | None) -> None:
    """Judge the content of all files that are going to be used."""
    files = {found.file for tensor in wanted for found in needed_pieces(reader, tensor)}
    files |= {STATE_FILE} if source is None else {STATE_FILE, source.file}
    try:
        reader.verify(files)
        with OpenFiles(reader.directory) as opened:
            check_agreement(reader, wanted, opened)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_alternative(root, reader.directory)}") from error


def _run_state(reader: CheckpointReader, options: LoadOptions) -> RunState:
    saved = reader.run_state
    if options.finetune:
        return RunState()
    if options.no_load_optim:
        logger.info("no_load_optim: optimizer, loss scale and learning-rate schedule start anew at %s", saved.iteration)
        return replace(saved, num_updates=0, loss_scale={})
    return saved


def _random_source(reader: CheckpointReader, holding: Holding) -> RandomSource:
    source = reader.random_source(holding.position)
    if source is None:
        raise CheckpointError(
            f"{reader.directory} has no random states (it was saved with no_save_rng): set no_load_rng: true to go on "
            "with freshly seeded ones"
        )
    return source


def _random_state(reader: CheckpointReader, source: RandomSource, holding: Holding) -> RandomState:
    state = reader.random_state(source)
    here, there = holding.position, source.saved_by
    if (here.stage, here.data_rank) == (there.stage, there.data_rank):
        # Tensor ranks go on alike in what they compute in common, and derive what they do not from it.
        return state
    logger.warning(
        "%s has no random state for data rank %d of stage %d (it was saved with %d of %d): derived one from that of "
        "data rank %d of stage %d",
        reader.directory,
        here.data_rank,
        here.stage,
        there.sizes.dp,
        there.sizes.pp,
        there.data_rank,
        there.stage,
    )
    return state.derived(here.data_rank + (here.stage << 32))


def _alternative(root: Path, broken: Path) -> str:
    """A sentence that names the newest complete checkpoint other than `broken` and says how to take it."""
    for iteration in reversed(catalog.saved_iterations(root)):
        directory = catalog.step_directory(root, iteration)
        if directory == broken:
            continue
        try:
            open_checkpoint(directory).verify()
        except CheckpointError:
            continue
        return (
            f"The newest other complete checkpoint is {directory}: to go on from it, write {directory.name} into "
            f"{root / catalog.LATEST_FILE}"
        )
    return f"There is no other complete checkpoint under {root}"
