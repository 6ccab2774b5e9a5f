"""DeepSpeed's engine as a shell: it runs forward, backward and step, and leaves the gradient to us.

The seams, each with a test that fails when a new DeepSpeed moves it (tests/engine/test_deepspeed_seams.py):

- `deepspeed.initialize` accepts an fp32 module and a torch optimizer instance, and makes a `DeepSpeedEngine` whose
  class can be swapped for a subclass;
- `allreduce_gradients` is what reduces after a backward;
- `deepspeed.utils.groups.mpu` remembers the grid of the last engine;
- `deepspeed.ops.__compatible_ops__` decides whether a shared-memory collective is compiled at start;
- at the boundary `step` calls the optimizer's `step` once and then drops `.grad`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from megatron.mpu.grid import ParallelGrid


class UpdateSeam(torch.optim.Optimizer):
    """What DeepSpeed takes for its optimizer. Its step is whatever `connect` was given."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._update: Callable[[], None] | None = None

    def connect(self, update: Callable[[], None]) -> None:
        """Have DeepSpeed's optimizer step call `update`."""
        self._update = update

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Run the connected update."""
        assert self._update is not None, "the engine stepped before an update was connected"
        self._update()


class ShellEngine(DeepSpeedEngine):
    """A `DeepSpeedEngine` whose gradient reduction is somebody else's."""

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing, where DeepSpeed would reduce: the hooks of our reducer are at it."""


def skip_shared_memory_collective() -> None:
    """Keep `deepspeed.initialize` from compiling a C++ op that only DeepSpeed's inference calls, for a minute."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def initialize_shell(
    module: torch.nn.Module, config: Mapping[str, Any], mpu: PipelineParallelGrid | None = None
) -> tuple[ShellEngine, UpdateSeam]:
    """Wrap an fp32 `module` in a DeepSpeed engine that leaves gradients and update to us.

    Collective over the world: DeepSpeed broadcasts the weights of the first data rank. `config` is a DeepSpeed
    configuration for fp32 and ZeRO 0; what it says about clipping is overruled, since DeepSpeed would clip by default.
    """
    engine, seam = initialize_deepspeed(module, config, mpu)
    engine.__class__ = ShellEngine
    return engine, seam


def initialize_deepspeed(
    module: torch.nn.Module, config: Mapping[str, Any], mpu: PipelineParallelGrid | None
) -> tuple[Any, UpdateSeam]:
    """Return what `deepspeed.initialize` makes of `module`, with a seam where its optimizer would be.

    `mpu` None: all ranks are data ranks, or, of a PipelineModule, what its own grid says.
    """
    _start_communication()
    # DeepSpeed keeps the grid of the last engine in its module and would take it for one that comes without.
    deepspeed.utils.groups.mpu = None
    seam = UpdateSeam([parameter for parameter in module.parameters() if parameter.requires_grad])
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=seam, config={**config, "gradient_clipping": 0.0}, mpu=mpu, dist_init_required=False
    )
    return engine, seam


def deepspeed_grid(grid: ParallelGrid) -> PipelineParallelGrid | None:
    """Return what tells DeepSpeed's plain engine which ranks are data ranks; None where all are.

    Collective over the world. Without it tensor ranks would be taken for data ranks and get each other's weights.
    """
    if grid.tensor.size == 1:
        return None
    with deepspeed_arranging():
        return PipelineParallelGrid(topology=grid.topology)


@contextmanager
def deepspeed_arranging() -> Iterator[None]:
    """Let DeepSpeed arrange ranks or layers before `initialize`: its communication is up, and its prints go nowhere."""
    _start_communication()
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _start_communication() -> None:
    """Have DeepSpeed take over the default process group; it does nothing the second time."""
    skip_shared_memory_collective()
    deepspeed.init_distributed(dist_init_required=False)
