"""Weights and optimizer state of ZeRO 3 as whole tensors: gathered to be saved, cut up when they are loaded.

DeepSpeed cuts each parameter into one run a data rank, the last one padded. It keeps the fp32 runs of a rank one behind
the other in a flat tensor for each of its sub-groups, and so does the torch optimizer with its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from megatron.engine.surface import EngineTensors

MASTER = "master"


class ElsewhereTensor(torch.Tensor):
    """A tensor of a shape and a dtype whose values are not here: `copy_` hands them to `write`, whole."""

    write: Callable[[torch.Tensor], None]

    @staticmethod
    def of(shape: torch.Size, dtype: torch.dtype, write: Callable[[torch.Tensor], None]) -> ElsewhereTensor:
        """Return a stand-in for values that only `write` can reach."""
        stand_in = torch.empty(shape, dtype=dtype, device="meta").as_subclass(ElsewhereTensor)
        stand_in.write = write
        return stand_in

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> ElsewhereTensor:
        """Write `source` to where the values are."""
        self.write(source)
        return self


class PartitionedState:
    """The parameters of a DeepSpeed ZeRO 3 optimizer, by name, and their way in and out."""

    def __init__(self, zero_optimizer: Any, parameters: Mapping[str, torch.nn.Parameter], data_rank: int) -> None:
        self._zero = zero_optimizer
        self._parameters = dict(parameters)
        self._rank = data_rank
        self._has_masters = zero_optimizer.dtype != torch.float32

    def gather(self, *, is_writer: bool, with_optimizer: bool) -> EngineTensors:
        """Return copies in host memory, on a rank that `is_writer`; nothing on the others.

        Collective over the data group. One tensor at a time is whole on the device.
        """
        weights: dict[str, torch.Tensor] = {}
        states: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self._parameters.items():
            master = safe_get_full_fp32_param(parameter)
            state = self._gather_state(parameter) if with_optimizer else {}
            if self._has_masters and with_optimizer:
                state[MASTER] = master
            if is_writer:
                # The weights in use are these, cast: the last thing an update does.
                weights[name] = master.to(self._zero.dtype).cpu()
                states[name] = {key: value.detach().clone().cpu() for key, value in state.items()}
        return EngineTensors(weights, states)

    def _gather_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        flat_state, sharded = self._state_of(parameter)
        return {
            key: safe_get_full_optimizer_state(parameter, key) if key in sharded else flat_state[key]
            for key in flat_state
        }

    def targets(self) -> EngineTensors:
        """Return stand-ins that cut up what is copied into them, and live counters.

        Copying a weight is collective over the data group.
        """
        weights: dict[str, torch.Tensor] = {}
        states: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self._parameters.items():
            shape = parameter.ds_shape  # type: ignore[attr-defined]
            weights[name] = ElsewhereTensor.of(shape, self._zero.dtype, partial(self._write_weight, parameter))
            flat_state, sharded = self._state_of(parameter)
            states[name] = {
                key: ElsewhereTensor.of(shape, value.dtype, partial(self._write_state, parameter, key))
                if key in sharded
                else value
                for key, value in flat_state.items()
            }
            if self._has_masters:
                write_master = partial(self.write_master, parameter)
                states[name][MASTER] = ElsewhereTensor.of(shape, torch.float32, write_master)
        return EngineTensors(weights, states)

    def write_master(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> None:
        """Set this rank's run of an fp32 master weight."""
        safe_set_local_fp32_param(parameter, self._own_run(parameter, whole))

    def _write_weight(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> None:
        """Set a weight in use, and its master to the same: a checkpoint that has a master brings it afterwards."""
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(whole)
        self.write_master(parameter, whole.to(self._zero.dtype))

    def _write_state(self, parameter: torch.nn.Parameter, key: str, whole: torch.Tensor) -> None:
        safe_set_local_optimizer_state(parameter, self._own_run(parameter, whole), key)

    def _own_run(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's run of `whole` in fp32, padded with zeros to the length of all runs."""
        length = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        held = whole.flatten()[self._rank * length : (self._rank + 1) * length]
        run = torch.zeros(length, dtype=torch.float32)
        run[: held.numel()] = held
        return run

    def _state_of(self, parameter: torch.nn.Parameter) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Return the optimizer state of the sub-group a parameter is in, and the keys of what is cut up with it."""
        sub_group, *_ = self._zero.grad_position[self._zero.get_param_id(parameter)]
        flat = self._zero.fp32_partitioned_groups_flat[sub_group]
        state = {key: value for key, value in self._zero.optimizer.state[flat].items() if torch.is_tensor(value)}
        return state, {key for key, value in state.items() if value.shape == flat.shape}


@torch.no_grad()
def allocate_optimizer_state(zero_optimizer: Any) -> None:
    """Have the torch optimizer make its state now, all zero, so that a checkpoint can be read into it.

    DeepSpeed replaced the optimizer's parameters by its flat ones; what was made for the former goes.
    """
    inner = zero_optimizer.optimizer
    inner.state.clear()
    for sub_group, flat in enumerate(zero_optimizer.fp32_partitioned_groups_flat):
        group = inner.param_groups[zero_optimizer.sub_group_to_group_id[sub_group]]
        kept, flat.grad = flat.grad, torch.zeros_like(flat)
        group["params"] = [flat]
        # Told that the step overflowed, the kernels make their state and change nothing.
        inner.grad_scale, inner.found_inf = torch.ones((), device=flat.device), torch.ones((), device=flat.device)
        inner.step()
        group["params"], flat.grad = [], kept
        for value in inner.state[flat].values():
            if torch.is_tensor(value):
                value.zero_()  # torch leaves a momentum buffer uninitialised in a step that overflowed
    inner.grad_scale = inner.found_inf = None
