"""When and how gradients are reduced and, where ranks update shards, parameters gathered."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron.data_parallel.arithmetic import ReductionArithmetic

# Buckets of this many elements were the fastest of those measured; see docs/measurements.md.
DEFAULT_BUCKET_ELEMENTS = 1_000_000


@dataclass(frozen=True)
class ReductionSettings:
    """What the flags of a run come to.

    With `overlap` gradients are reduced under backward. `zero_stage` 0 reduces whole gradients, 1 gives each rank its
    shard of them, 2 does so after every micro-batch. With `delay_on_later_stages` all stages of a pipeline but
    the first launch after their last backward. With `overlap_param_gather` updated shards are gathered under the next
    forward. The first `num_proving_steps` are made with and without overlap and compared.
    """

    overlap: bool
    arithmetic: ReductionArithmetic
    zero_stage: int = 0
    bucket_elements: int = DEFAULT_BUCKET_ELEMENTS
    check_for_nan: bool = False
    num_proving_steps: int = 0
    overlap_param_gather: bool = False
    delay_on_later_stages: bool = True

    def lines(self) -> list[str]:
        """The settings as text, for comparing them between ranks."""
        return [f"{field.name} {getattr(self, field.name)}" for field in fields(self)]
