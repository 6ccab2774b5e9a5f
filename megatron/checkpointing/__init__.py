"""Checkpoints: laid out by layer, readable whatever the parallelism; published atomically; checked before use.

    global_step<N>/
      manifest.json                       model values, layouts of parameters, and what of them is in which file
      layer_000.safetensors               weights of a layer, in the dtype they were trained in
      optimizer_layer_000.safetensors     `<parameter>/<state>`: master weights, moments, counters
      state.json                          iteration, consumed samples, schedule, loss scale
      random_rank_000.safetensors         random number generators of a data rank

docs/checkpoints.md describes the layout: files of several tensor ranks, data ranks and stages have longer names.
Saving: snapshot, holding -> parts -> save -> publication. Loading, led by restore: reader -> compare -> assemble ->
targets. Nothing here knows torch.distributed: a rank says what it holds and passes a way to agree with the others.
"""

from megatron.checkpointing.catalog import Retention, find_latest, saved_iterations
from megatron.checkpointing.holding import GridPosition, Holding, ParallelSizes
from megatron.checkpointing.model_values import model_values
from megatron.checkpointing.random_state import RandomState
from megatron.checkpointing.reader import CheckpointReader, open_checkpoint
from megatron.checkpointing.restore import Loaded, LoadOptions, check_saved_model, find_checkpoint, load_checkpoint
from megatron.checkpointing.role import Part, SaveRole
from megatron.checkpointing.save import save
from megatron.checkpointing.schedule import save_iterations
from megatron.checkpointing.snapshot import (
    ModelValues,
    OptimizerState,
    RunState,
    Scalar,
    Snapshot,
)

__all__ = [
    "CheckpointReader",
    "GridPosition",
    "Holding",
    "LoadOptions",
    "Loaded",
    "ModelValues",
    "OptimizerState",
    "ParallelSizes",
    "Part",
    "RandomState",
    "Retention",
    "RunState",
    "SaveRole",
    "Scalar",
    "Snapshot",
    "check_saved_model",
    "find_checkpoint",
    "find_latest",
    "load_checkpoint",
    "model_values",
    "open_checkpoint",
    "save",
    "save_iterations",
    "saved_iterations",
]
