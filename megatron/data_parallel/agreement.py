"""What ranks must have in common, compared before a difference can become a hang.

Each rank makes claims about things that it shares with others: its stage's parameters, its buckets, the settings of the
run. Ranks that claim something about the same subject must say the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.errors import ConfigError

T = TypeVar("T")


def check_ranks_agree(claims: Mapping[str, Sequence[str]], group: dist.ProcessGroup | None) -> None:
    """Compare this rank's `claims`, lines of text by subject, with those of all ranks of `group`.

    Collective over the group; None has one rank. When ranks differ, all of them raise the same ConfigError: it names
    two ranks, and the first line of which one of them has another version or none.
    """
    if group is None:
        return
    hashes = _gathered({subject: _hash(lines) for subject, lines in claims.items()}, group)
    differing = _first_difference(hashes)
    if differing is None:
        return
    subject, first, other = differing
    lines = _gathered(claims.get(subject, ()), group)
    raise ConfigError(
        f"ranks {dist.get_global_rank(group, first)} and {dist.get_global_rank(group, other)} do not agree on "
        f"{subject}: {_difference(lines[first], lines[other])}"
    )


def parameter_lines(parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """Say of each parameter what its ranks must have in common."""
    return [
        f"{name} {list(parameter.shape)} {'trained' if parameter.requires_grad else 'frozen'}"
        for name, parameter in parameters.items()
    ]


def _gathered(mine: T, group: dist.ProcessGroup) -> list[T]:
    everyones = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def _hash(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _first_difference(hashes: Sequence[Mapping[str, str]]) -> tuple[str, int, int] | None:
    """Return a subject, the first rank that has a claim about it, and the first that claims something else."""
    first: dict[str, int] = {}
    for rank, of_rank in enumerate(hashes):
        for subject, value in of_rank.items():
            if hashes[first.setdefault(subject, rank)][subject] != value:
                return subject, first[subject], rank
    return None


def _difference(first: Sequence[str], other: Sequence[str]) -> str:
    """Say in words where two lists part; what both have somewhere is no difference, unless order is all there is."""
    pairs = list(
        zip_longest([line for line in first if line not in other], [line for line in other if line not in first])
    )
    if not pairs:
        pairs = [pair for pair in zip_longest(first, other) if pair[0] != pair[1]]
    left, right = (f"'{line}'" if line is not None else "nothing" for line in pairs[0])
    more = f", and {len(pairs) - 1} more such lines" if len(pairs) > 1 else ""
    return f"the first has {left} where the other has {right}{more}"
