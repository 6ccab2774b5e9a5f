"""The tensors of a running model that a checkpoint is read into."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megatron.checkpointing.assemble import WantedTensor, assemble
from megatron.checkpointing.file_names import layer_index
from megatron.checkpointing.holding import Holding
from megatron.checkpointing.open_files import OpenFiles
from megatron.checkpointing.parts import state_names
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.snapshot import OptimizerState

logger = logging.getLogger(__name__)

# The optimizer's own fp32 copy of a weight, which starts as the weight does; all its other state starts at zero.
_MASTER = "master"


@dataclass(frozen=True)
class Target:
    """What is wanted, and the tensor to copy it into."""

    wanted: WantedTensor
    tensor: Tensor


def weight_targets(weights: Mapping[str, Tensor], holding: Holding) -> list[Target]:
    """The slices of the weights that a rank holds."""
    return [Target(_wanted_weight(name, weight, holding), weight) for name, weight in weights.items()]


def state_targets(state: OptimizerState, weights: Mapping[str, Tensor], holding: Holding) -> list[Target]:
    """The runs of the optimizer's tensors that a rank holds; nothing of a parameter whose run is empty."""
    return [target for name in state for target in _state_of(name, state[name], weights[name], holding)]


def _wanted_weight(name: str, weight: Tensor, holding: Holding) -> WantedTensor:
    return WantedTensor("weights", name, None, holding.layout(name, weight), holding.weight_piece(name, weight))


def _state_of(name: str, state: Mapping[str, Tensor], weight: Tensor, holding: Holding) -> Iterator[Target]:
    piece = holding.state_piece(name, weight)
    if holding.shards is not None and piece.numel == 0:
        return
    _, counters = state_names(name, state, piece.numel)
    for key, tensor in state.items():
        wanted = WantedTensor("optimizer", name, key, holding.layout(name, weight), piece, key in counters)
        yield Target(wanted, tensor)


@torch.no_grad()
def fill(what: str, targets: Sequence[Target], reader: CheckpointReader) -> None:
    """Copy the saved values into the targets, layer by layer; a cast to another dtype is said."""

    def layer(target: Target) -> int:
        return layer_index(target.wanted.parameter)

    casts = set()
    for _, of_layer in groupby(sorted(targets, key=layer), layer):
        with OpenFiles(reader.directory) as files:
            for target in of_layer:
                values = assemble(reader, target.wanted, files)
                _copy(values, target)
                if values.dtype != target.tensor.dtype:
                    casts.add(f"{values.dtype} to {target.tensor.dtype}")
    if casts:
        logger.warning("%s were cast while loading: %s", what, ", ".join(sorted(casts)))


def _copy(values: Tensor, target: Target) -> None:
    """Copy; rows of a vocabulary that the checkpoint does not have keep their starting values, without a past."""
    if values.numel() == target.tensor.numel():
        target.tensor.copy_(values.view(target.tensor.shape))
        return
    has_values = target.wanted.key in (None, _MASTER)
    elements = target.tensor.flatten().clone() if has_values else torch.zeros_like(target.tensor).flatten()
    elements[: values.numel()] = values
    target.tensor.copy_(elements.view(target.tensor.shape))
