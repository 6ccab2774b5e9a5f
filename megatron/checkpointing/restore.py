"""Bringing a checkpoint into a model: everything is checked before the first value changes."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpointing import catalog
from megatron.checkpointing.manifest import layer_index
from megatron.checkpointing.random_state import RandomState
from megatron.checkpointing.reader import CheckpointReader, open_checkpoint
from megatron.checkpointing.snapshot import ModelValues, OptimizerState, RunState
from megatron.errors import CheckpointError

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 10


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

    None, with a line in the log, if `root` holds no checkpoint and no iteration was asked for. CheckpointError, naming
    a complete one if there is any, if the one wanted is missing or incomplete.
    """
    directory = catalog.find_latest(root) if iteration is None else catalog.step_directory(root, iteration)
    if directory is None:
        logger.info("no checkpoint under %s", root)
        return None
    try:
        return open_checkpoint(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_alternative(root, directory)}") from error


def load_checkpoint(
    root: Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer_state: OptimizerState | None = None,
    model: ModelValues | None = None,
    options: LoadOptions | None = None,
    data_rank: int = 0,
    iteration: int | None = None,
    layers: Collection[int] | None = None,
) -> Loaded | None:
    """Copy a checkpoint into `weights` and `optimizer_state`, in place and bit for bit, and return the rest of it.

    None if there is nothing to load (`find_checkpoint`). Every check (files, checksums, `model` values, names, shapes)
    comes before the first copy; what does not fit raises CheckpointError with all differences in one message. `layers`
    are the ones this rank holds (None: all); weights of other layers may be left over. Without `optimizer_state` no
    optimizer is restored, as for generation.
    """
    options = options or LoadOptions()
    reader = find_checkpoint(root, iteration)
    if reader is None:
        return None
    takes_optimizer = options.takes_optimizer_state and optimizer_state is not None
    optimizer_tensors = _flatten(optimizer_state) if takes_optimizer and optimizer_state is not None else {}
    _check_model(reader, model or {}, finetune=options.finetune)
    try:
        reader.verify(_needed(layers, weights))
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_alternative(root, reader.directory)}") from error
    _check_shapes(reader, "weights", weights, reader.weight_shapes(_needed(layers, weights)), layers)
    if takes_optimizer:
        _check_optimizer(reader, optimizer_tensors, layers)
    loaded = Loaded(
        directory=reader.directory,
        run_state=_run_state(reader, options),
        optimizer_restored=takes_optimizer,
        random_state=_random_state(reader, data_rank) if options.takes_random_state else None,
    )
    _copy("weights", reader.weights(weights), weights)
    _copy("optimizer state", reader.optimizer_state(optimizer_tensors), optimizer_tensors)
    return loaded


def _flatten(optimizer_state: OptimizerState) -> dict[str, Tensor]:
    return {f"{name}/{key}": tensor for name, states in optimizer_state.items() for key, tensor in states.items()}


@torch.no_grad()
def _copy(what: str, sources: Iterable[tuple[str, Tensor]], targets: Mapping[str, Tensor]) -> None:
    casts = set()
    for name, source in sources:
        target = targets[name]
        if source.dtype != target.dtype:
            casts.add(f"{source.dtype} to {target.dtype}")
        target.copy_(source)
    if casts:
        logger.warning("%s were cast while loading: %s", what, ", ".join(sorted(casts)))


def _check_model(reader: CheckpointReader, model: ModelValues, *, finetune: bool) -> None:
    saved = reader.manifest.model
    differences = [
        f"{key} was {saved[key]!r} and is {value!r}"
        for key, value in model.items()
        if key in saved and saved[key] != value
    ]
    if not differences:
        return
    message = f"{reader.directory} is of another model: {'; '.join(differences)}"
    if not finetune:
        raise CheckpointError(f"{message}. With finetune: true, weights of equal shapes are taken all the same")
    logger.warning("%s; finetune: true takes its weights all the same", message)


def _check_optimizer(reader: CheckpointReader, tensors: Mapping[str, Tensor], layers: Collection[int] | None) -> None:
    if not reader.has_optimizer_state:
        raise CheckpointError(
            f"{reader.directory} has no optimizer state (it was saved with no_save_optim): set no_load_optim: true to "
            "go on with a fresh optimizer, or finetune: true to start again at iteration 0"
        )
    _check_shapes(reader, "optimizer state", tensors, reader.optimizer_shapes(_needed(layers, tensors)), layers)


def _needed(layers: Collection[int] | None, names: Iterable[str]) -> set[int] | None:
    """Layers whose files are read: the rank's own and, on a last stage, that of the embedding its head is tied to."""
    return None if layers is None else {*layers, *map(layer_index, names)}


def _check_shapes(
    reader: CheckpointReader,
    what: str,
    wanted: Mapping[str, Tensor],
    saved: Mapping[str, torch.Size],
    layers: Collection[int] | None,
) -> None:
    # The rest of the layer a tied head's weight comes from is another stage's business.
    surplus = [name for name in saved if name not in wanted and (layers is None or layer_index(name) in layers)]
    reshaped = [name for name in wanted if name in saved and wanted[name].shape != saved[name]]
    faults = [
        _list_names("missing in the checkpoint", [name for name in wanted if name not in saved]),
        _list_names("not in this model", surplus),
        _list_names(
            "of another shape",
            [f"{name} (saved {list(saved[name])}, here {list(wanted[name].shape)})" for name in reshaped],
        ),
    ]
    if any(faults):
        raise CheckpointError(f"the {what} in {reader.directory} do not fit: {'; '.join(filter(None, faults))}")


def _list_names(fault: str, names: list[str]) -> str:
    if not names:
        return ""
    more = len(names) - _NAMES_SHOWN
    return f"{fault}: {', '.join(names[:_NAMES_SHOWN])}" + (f" and {more} more" if more > 0 else "")


def _run_state(reader: CheckpointReader, options: LoadOptions) -> RunState:
    saved = reader.run_state
    if options.finetune:
        return RunState()
    if options.no_load_optim:
        logger.info("no_load_optim: optimizer, loss scale and learning-rate schedule start anew at %s", saved.iteration)
        return replace(saved, num_updates=0, loss_scale={})
    return saved


def _random_state(reader: CheckpointReader, data_rank: int) -> RandomState:
    state = reader.random_state(data_rank)
    if state is None:
        raise CheckpointError(
            f"{reader.directory} has no random states (it was saved with no_save_rng): set no_load_rng: true to go on "
            "with freshly seeded ones"
        )
    if data_rank not in reader.random_ranks:
        logger.warning(
            "%s has no random state for data rank %d (it was saved with %d): derived one from that of data rank %d",
            reader.directory,
            data_rank,
            len(reader.random_ranks),
            reader.random_ranks[0],
        )
    return state


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
