"""Which rank writes which parts of a checkpoint."""

from dataclasses import dataclass
from typing import Literal

from megatron.checkpointing.holding import GridPosition

Part = Literal["weights", "optimizer_state", "random_state"]


@dataclass(frozen=True)
class SaveRole:
    """What one rank of `world_size` contributes. Global rank 0 also writes `state.json` and publishes."""

    rank: int
    world_size: int
    writes: frozenset[Part]

    @classmethod
    def of_rank(
        cls, rank: int, world_size: int, position: GridPosition | None = None, *, sharded_state: bool = False
    ) -> "SaveRole":
        """The role of global rank `rank` at `position`; `sharded_state` where ZeRO splits the optimizer's state.

        The first data rank of each stage and tensor rank writes weights. Optimizer state is written by every data rank
        where each has its own, by the first otherwise. Every rank has a random state.
        """
        position = position or GridPosition()
        writes: set[Part] = {"random_state"}
        if position.data_rank == 0:
            writes.add("weights")
        if position.data_rank == 0 or sharded_state:
            writes.add("optimizer_state")
        return cls(rank, world_size, frozenset(writes))

    @property
    def publishes(self) -> bool:
        """Whether this rank prepares the directory and publishes the result."""
        return self.rank == 0
