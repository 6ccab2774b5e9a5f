"""The executor of one stage of several: DeepSpeed's pipeline engine runs its schedule, and we own the gradients.

DeepSpeed keeps the one-forward-one-backward schedule and the sends and receives between stages. The seams, each with a
test that fails when a new DeepSpeed moves it (tests/engine/test_pipeline_seams.py):

- `PipelineModule` takes ready modules, and specs of what other ranks build;
- an engine looks its instructions up in `_INSTRUCTION_MAP`, which an instance may have for itself;
- `_exec_schedule` runs a schedule and leaves the loss of each micro-batch in `fwd_outputs` of the last stage;
- the last stage runs backward on `loss`, any other on its output, with the gradient that it received;
- `reset_activation_shape` has sender and receiver exchange shapes anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from deepspeed.runtime.pipe import LayerSpec, PipelineModule, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron.engine.executor import GradientPath, mean_loss
from megatron.engine.shell import deepspeed_arranging, initialize_deepspeed
from megatron.engine.surface import OnDevice
from megatron.mpu.grid import ParallelGrid

_log = logging.getLogger(__name__)


class StageModule(Protocol):
    """What a module must offer, besides being an `nn.Module`, to be trained as one of several stages."""

    @property
    def stage(self) -> torch.nn.Module:
        """This stage's layers: map `split`'s inputs, or what the stage before returned, to one tensor."""
        ...

    def split(self, micro_batch: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return what the first stage reads of a micro-batch, and what the loss needs of it."""
        ...

    def loss(self, outputs: torch.Tensor, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the mean loss of the last stage's outputs; shape ()."""
        ...

    def synthetic_input(self, micro_batch: Any) -> torch.Tensor:
        """Return something of the kind, shape and dtype that this stage's layers take for a micro-batch."""
        ...


class StageEngine(PipelineEngine):
    """A `PipelineEngine` whose gradients and update are somebody else's."""

    loss: torch.Tensor
    gradients: GradientPath

    def take_over(self, gradients: GradientPath) -> None:
        """Have this engine, and no other, run our instructions where gradients are concerned."""
        self.gradients = gradients
        self._INSTRUCTION_MAP = {
            **PipelineEngine._INSTRUCTION_MAP,
            schedule.BackwardPass: StageEngine.run_backward,
            schedule.ReduceTiedGrads: StageEngine.leave_to_reducer,
            schedule.ReduceGrads: StageEngine.leave_to_reducer,
            schedule.OptimizerStep: StageEngine.finish_and_update,
        }

    def run_backward(self, buffer_id: int) -> None:
        """Run the backward of one micro-batch. The reducer counts them: DeepSpeed knows no boundary here."""
        if self.is_last_stage():
            self.loss = self.gradients.scale_loss(self.loss)
        with self.gradients.backward_pass():
            self._exec_backward_pass(buffer_id)
        if self.is_last_stage():
            # DeepSpeed would keep these logits until the next micro-batch has made its own.
            self.loss = self.loss.detach()
            self.pipe_buffers["outputs"][buffer_id] = None

    def leave_to_reducer(self) -> None:
        """Do nothing, where DeepSpeed would reduce: the hooks of our reducer are at it."""

    def finish_and_update(self) -> None:
        """Complete the reduction and have DeepSpeed call the seam."""
        self.gradients.finish()
        self._exec_optimizer_step()


class PipelineStage:
    """Runs one stage. Collective over the world when it is made."""

    # The other stages wait for activations or gradients that will never come.
    can_go_on_after_error = False

    def __init__(self, module: Any, grid: ParallelGrid, deepspeed_config: Mapping[str, Any]) -> None:
        """`module` is an fp32 module that is also a `StageModule`."""
        self._stage_module: StageModule = module
        self._is_last = grid.is_last_stage
        self._engine, self._seam = _initialize(module, grid, deepspeed_config)
        self.module: torch.nn.Module = module
        self.device: torch.device = self._engine.device
        self.num_micro_batches: int = self._engine.micro_batches
        self._shapes_are_known = False
        if self.num_micro_batches < grid.pipe.size:
            _log.warning(
                "%d micro-batches a step do not fill %d pipeline stages: stages wait for each other most of the time; "
                "raise gradient_accumulation_steps",
                self.num_micro_batches,
                grid.pipe.size,
            )

    def connect(self, gradients: GradientPath) -> None:
        """Send the gradients of every `run` on this path."""
        self._engine.take_over(gradients)
        self._seam.connect(gradients.on_reduced)

    def rehearsal_loss(self, micro_batch: OnDevice) -> torch.Tensor:
        """Run this stage by itself, on made-up activations where others would send them."""
        on_device = micro_batch.to(self.device)
        outputs = self._stage_module.stage(self._stage_module.synthetic_input(on_device))
        if self._is_last:
            return self._stage_module.loss(outputs, self._stage_module.split(on_device)[1])
        total: torch.Tensor = outputs.float().sum()
        return total

    def run(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Run DeepSpeed's training schedule: all micro-batches, reduction and update."""
        self._engine.train()
        if not self._shapes_are_known:
            self._engine.reset_activation_shape()
        loss = self._execute(self._engine._train_schedule(), micro_batches)
        self._shapes_are_known = True
        return loss

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Run DeepSpeed's inference schedule, which is forward only."""
        self._engine.eval()
        # An evaluation may use other shapes than training, and than the one before.
        self._engine.reset_activation_shape()
        self._shapes_are_known = False
        return self._execute(self._engine._inference_schedule(self.num_micro_batches), micro_batches)

    def close(self) -> None:
        """Let DeepSpeed clean up after itself."""
        self._engine.destroy()

    def _execute(self, steps: schedule.PipeSchedule, micro_batches: Iterator[OnDevice]) -> torch.Tensor:
        """Run a schedule, which takes micro-batches on first and last stage only, and return their mean loss."""
        engine = self._engine
        engine.total_loss = None
        engine._compute_loss = True
        engine.set_dataiterator(self._stage_module.split(batch.to(self.device)) for batch in micro_batches)
        engine._exec_schedule(steps)
        engine.set_dataiterator(None)
        return mean_loss(engine.fwd_outputs, self.device)


def _initialize(module: Any, grid: ParallelGrid, config: Mapping[str, Any]) -> tuple[StageEngine, Any]:
    """Wrap this stage's layers in DeepSpeed's pipeline engine.

    DeepSpeed sees one layer a stage and never builds those of others. It broadcasts weights over the data ranks of this
    stage and tensor rank, as the topology says.
    """
    layers: list[Any] = [LayerSpec(torch.nn.Identity)] * grid.pipe.size
    layers[grid.pipe.rank] = module.stage
    with deepspeed_arranging():
        pipeline_module = PipelineModule(
            layers,
            topology=grid.topology,
            loss_fn=module.loss,
            partition_method="uniform",
            activation_checkpoint_interval=0,  # the layers recompute by themselves
        )
    # Activations differ between tensor ranks under sequence parallelism: DeepSpeed must not send a part of each.
    whole = {"pipe_partitioned": False, "grad_partitioned": False, "activation_checkpoint_interval": 0}
    engine, seam = initialize_deepspeed(pipeline_module, {**config, "pipeline": whole}, None)
    engine.__class__ = StageEngine
    return engine, seam
