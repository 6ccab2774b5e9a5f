"""What a checkpoint holds, before it is laid out in files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron.checkpointing.holding import Holding
from megatron.checkpointing.random_state import RandomState

# Values of the configuration that decide whether weights fit a model, by their NeoX names.
Scalar = bool | int | float | str | None
ModelValues = Mapping[str, Scalar]
# State tensors by parameter name, then by state name ("master", "exp_avg", ...): an element for each of the parameter's
# that the rank holds state of, or 0-dim where the state is a counter.
OptimizerState = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class RunState:
    """Counters of a run. A skipped (overflowed) iteration counts in `iteration` but not in `num_updates`.

    `loss_scale` is what a dynamic loss scale needs to go on; empty without one.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    num_updates: int = 0
    skipped_iterations: int = 0
    loss_scale: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """One rank's view of a run at a step boundary. Tensors are read while saving, never changed or kept.

    `weights` and `optimizer_state` use the names `layers.<index>.<...>`, the same whatever the pipeline size; a weight
    shared by two layers appears once, under its first name, also on a stage that has only the second. `holding` says
    what part of each parameter they are.
    """

    weights: Mapping[str, Tensor]
    run_state: RunState
    optimizer_state: OptimizerState | None = None
    random_state: RandomState | None = None
    model: ModelValues = field(default_factory=dict)
    holding: Holding = field(default_factory=Holding)
    bucket_plan: Sequence[Sequence[str]] | None = None
