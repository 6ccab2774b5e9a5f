"""Who is missing when a collective fails: the ranks that are still there say how far they have come.

A collective that fails says nothing about the rank that did not join it. A store is beside all process groups: each
rank that meets a failure writes down there how many launches it has made, and reads what the others wrote.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

_POLL_S = 0.1


@dataclass(frozen=True)
class RollCall:
    """Asks the ranks that share `store`. Ranks meet a failure at about the same time: `patience_s` is how far apart."""

    store: dist.Store
    patience_s: float = 10.0

    def absent(self, ranks: Sequence[int], num_launches: int) -> str:
        """Say, in words, which of the global `ranks` did not make as many launches as this one.

        To be called by every rank that meets the failure. Waits for answers up to `patience_s`.
        """
        own_rank = dist.get_rank()
        deadline = time.monotonic() + self.patience_s
        behind: list[int] = []
        silent = [rank for rank in ranks if rank != own_rank]
        try:
            self.store.set(_key(own_rank), str(num_launches))
            while silent and time.monotonic() < deadline:
                for rank in [rank for rank in silent if self.store.check([_key(rank)])]:
                    silent.remove(rank)
                    if int(self.store.get(_key(rank))) < num_launches:
                        behind.append(rank)
                time.sleep(_POLL_S)
        except RuntimeError:
            return f"the others cannot be asked, rank 0, which keeps their answers, has gone ({_list(silent)} unheard)"
        said = [
            f"{_list(behind)} had not launched it" if behind else "",
            f"{_list(silent)} had not launched it or died since: no answer" if silent else "",
        ]
        return "; ".join(filter(None, said)) or "all ranks had launched it: the network between them failed"


def _key(rank: int) -> str:
    return f"roll_call/{rank}"


def _list(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
