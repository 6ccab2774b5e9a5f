"""Who is missing when a collective fails: the ranks that are still there say how far they have come.

A collective that fails says nothing about the rank that did not join it. A store is beside all process groups: each
rank that meets a failure writes down there how many launches it has made, and reads what the others wrote.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch.distributed as dist

_POLL_S = 0.1


@dataclass(frozen=True, order=True)
class Progress:
    """How far a rank has come: steps begun, and collectives launched in the last of them."""

    num_steps: int
    num_launches: int


@dataclass(frozen=True)
class RollCall:
    """Asks the ranks that share `store`. Ranks meet a failure at about the same time: `patience_s` is how far apart."""

    store: dist.Store
    patience_s: float

    @classmethod
    def within(cls, timeout_s: float, store: dist.Store) -> RollCall:
        """Return one whose patience is a tenth of the time in which a run must end, at most ten seconds."""
        return cls(store, min(10.0, timeout_s / 10))

    def absent(self, ranks: Sequence[int], progress: Progress) -> str:
        """Say, in words, which of the global `ranks` had not come as far as this one.

        To be called by every rank that meets the failure. Waits for answers up to `patience_s`.
        """
        own_rank = dist.get_rank()
        deadline = time.monotonic() + self.patience_s
        behind: list[int] = []
        silent = [rank for rank in ranks if rank != own_rank]
        try:
            self.store.set(_key(own_rank), json.dumps(astuple(progress)))
            while silent and time.monotonic() < deadline:
                for rank in [rank for rank in silent if self.store.check([_key(rank)])]:
                    silent.remove(rank)
                    if Progress(*json.loads(self.store.get(_key(rank)))) < progress:
                        behind.append(rank)
                time.sleep(_POLL_S)
        except RuntimeError:
            return f"the others cannot be asked, rank 0 having gone with the answers ({_list(silent)} unheard)"
        said = [
            f"{_list(behind)} had not launched it" if behind else "",
            f"{_list(silent)} had not launched it or died since: no answer" if silent else "",
        ]
        return "; ".join(filter(None, said)) or "all ranks had launched it: the network between them failed"


def is_communication_failure(error: Exception) -> bool:
    """Whether a backend raised `error` because another rank did not do its part: gloo has no class for it."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection closed by peer" in str(error)


def _key(rank: int) -> str:
    return f"roll_call/{rank}"


def _list(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
