"""The fp32 weights that an optimizer on this rank updates, and where their values go.

Whole parameters, or with sharded buckets the flat runs of them that this rank owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.data_parallel.param_gather import ParameterGather
from megatron.errors import ConfigError


@dataclass(frozen=True)
class OwnedWeights:
    """What this rank updates, by parameter name.

    `masters` are fp32, `values` the same elements in the training dtype: one tensor where that is fp32 too. `shapes`
    are those of the whole parameters. `runs` says which elements, in memory order, of a parameter they are; None when
    all masters are whole.
    """

    masters: Mapping[str, torch.nn.Parameter]
    values: Mapping[str, torch.Tensor]
    shapes: Mapping[str, torch.Size]
    runs: Mapping[str, range] | None = None

    @property
    def separate(self) -> list[tuple[torch.Tensor, torch.nn.Parameter]]:
        """Pairs of value and master where they are two tensors."""
        return [
            (self.values[name], master)
            for name, master in self.masters.items()
            if self.values[name].data_ptr() != master.data_ptr()
        ]


def cast_parameters(parameters: Mapping[str, torch.nn.Parameter], dtype: torch.dtype) -> OwnedWeights:
    """Cast `parameters` to `dtype` in place and return the whole fp32 weights of those that are trained.

    For fp32 these are the parameters themselves; otherwise copies that keep the bits the cast drops. Frozen
    parameters are cast too and have no master.

    Raises ConfigError for a parameter that leaves gaps in memory, which fused kernels would read.
    """
    masters: dict[str, torch.nn.Parameter] = {}
    for name, parameter in parameters.items():
        if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
            raise ConfigError(f"parameter {name} does not fill its memory (strides {list(parameter.stride())})")
        if parameter.dtype == dtype:
            master = parameter
        else:
            master = torch.nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
            parameter.data = parameter.detach().to(dtype)
        if parameter.requires_grad:
            masters[name] = master
    values = {name: parameters[name].detach() for name in masters}
    return OwnedWeights(masters, values, {name: master.shape for name, master in masters.items()})


def shard_weights(whole: OwnedWeights, gather: ParameterGather) -> OwnedWeights:
    """Keep of `whole` what this rank updates: its runs of the gathered parameters, and all others whole.

    The masters that are left out are freed when the caller lets go of `whole`.
    """
    runs, own_values = gather.runs, gather.own_values
    if not gather.names:
        return whole
    masters: dict[str, torch.nn.Parameter] = {}
    values: dict[str, torch.Tensor] = {}
    all_runs: dict[str, range] = {}
    for name, master in whole.masters.items():
        if name not in gather.names:
            masters[name], values[name] = master, whole.values[name]
            all_runs[name] = range(master.numel())
        elif name in runs:
            run, value = runs[name], own_values[name]
            own = value if value.dtype == master.dtype else _in_memory_order(master)[run.start : run.stop].clone()
            masters[name], values[name], all_runs[name] = torch.nn.Parameter(own), value, run
    return OwnedWeights(masters, values, whole.shapes, all_runs)


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))
