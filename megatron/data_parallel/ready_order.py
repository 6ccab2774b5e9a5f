"""The order in which backward finishes gradients, seen in a rehearsal before the first step.

Buckets filled in this order can be launched one after the other while backward goes on. The order of registration says
little about it: a module that is registered first may run last.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.errors import ConfigError

_log = logging.getLogger(__name__)


@contextmanager
def record_ready_order(parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[list[str]]:
    """Yield a list to which each name is appended when backward has finished that parameter's gradient.

    Run exactly one forward and backward inside. The gradients it leaves are dropped at exit. A sparse gradient raises
    ConfigError from that backward.
    """
    seen: list[str] = []

    def note(parameter: torch.Tensor, name: str) -> None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ConfigError(f"the gradient of {name} is sparse; only dense gradients can be reduced in buckets")
        seen.append(name)

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: note(p, name))
        for name, parameter in parameters.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parameters.values():
            parameter.grad = None


def complete_ready_order(seen: Sequence[str], parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """Turn what was seen in a rehearsal into an order of all parameters.

    Parameters without a gradient come last, in reverse order of registration, and are named once in the log: they may
    belong to a branch that the rehearsal did not take. Their bucket is reduced with zeros until they take part.

    Raises ConfigError when no parameter at all got a gradient, and when a gradient was finished more than once in a
    single backward: that is a weight shared between reentrant checkpoints, whose first firing carries a partial sum.
    """
    if parameters and not seen:
        raise ConfigError(
            f"none of the {len(parameters)} trainable parameters got a gradient in the rehearsal step: the loss does "
            f"not depend on {', '.join(list(parameters)[:3])}, ... (a reentrant activation checkpoint around integer "
            "inputs cuts the graph in this way)"
        )
    repeated = [name for name, count in Counter(seen).items() if count > 1]
    if repeated:
        raise ConfigError(
            f"the gradient of {', '.join(repeated)} is finished more than once in one backward: a weight shared "
            "between reentrant activation checkpoints cannot be reduced; use non-reentrant checkpoints"
        )
    unused = [name for name in reversed(list(parameters)) if name not in set(seen)]
    if unused:
        _log.warning("no gradient in the rehearsal step for %s; reduced as zeros until they get one", ", ".join(unused))
    return [*seen, *unused]


def agree_on_order(order: Sequence[str], group: dist.ProcessGroup | None) -> list[str]:
    """Take the order that the first rank of `group` saw. Collective over the group, whose ranks train the same."""
    if group is None:
        return list(order)
    agreed: list[list[str]] = [list(order)]
    dist.broadcast_object_list(agreed, src=dist.get_global_rank(group, 0), group=group)
    return agreed[0]
