"""Looks whether overlap hides anything, and says so once when it does not."""

from __future__ import annotations

import logging

from megatron.engine.results import StepCommunication

_log = logging.getLogger(__name__)

NUM_STEPS = 20
LEAST_HIDDEN = 0.05


class OverlapWatch:
    """Adds up what was hidden of the gradient reduction over the steps 2 to 21 of a process.

    The first step also connects and allocates. A step is read when the next one has been made, when nothing of it is
    still to come.
    """

    def __init__(self) -> None:
        self._unread: StepCommunication | None = None
        self._num_seen = 0
        self._in_flight_s = 0.0
        self._exposed_s = 0.0

    def add(self, communication: StepCommunication | None) -> None:
        """Take a step's gradient communication; after the last one that counts, warn if too little was hidden."""
        if communication is None or self._num_seen > NUM_STEPS:
            return
        if self._unread is not None and self._num_seen > 0:
            self._in_flight_s += self._unread.in_flight_s
            self._exposed_s += self._unread.exposed_s
        if self._unread is not None:
            self._num_seen += 1
        self._unread = communication
        if self._num_seen > NUM_STEPS:
            self._judge(communication)

    def _judge(self, last: StepCommunication) -> None:
        hidden = 1.0 - self._exposed_s / self._in_flight_s if self._in_flight_s > 0 else 1.0
        if hidden < LEAST_HIDDEN:
            _log.warning(
                "overlap_grad_reduce hid %.0f %% of the gradient reduction over %d steps (%.1f ms a step are exposed): "
                "%s",
                100 * max(hidden, 0.0),
                NUM_STEPS,
                1e3 * self._exposed_s / NUM_STEPS,
                likely_reason(last),
            )


def likely_reason(step: StepCommunication) -> str:
    """Return why little of a step's reduction was hidden, from what its collectives looked like."""
    sizes = [times.bytes_sent for times in step.collectives]
    if len(sizes) == 1:
        return "all gradients travel in one bucket, which is ready when backward ends; lower ddp_bucket_size"
    if max(sizes) > sum(sizes) / 2:
        return (
            f"one of {len(sizes)} buckets carries {max(sizes) / sum(sizes):.0%} of the bytes, and is the last to be "
            "ready if it is the embedding's; a larger gradient_accumulation_steps sends it less often"
        )
    launches_s = sum(end.seconds_since(start) for times in step.collectives for start, end in times.blocked[:1])
    if launches_s > step.exposed_s / 2:
        return "launching the collectives takes most of the time; raise ddp_bucket_size"
    return (
        "the link is too slow for what backward can hide; a larger gradient_accumulation_steps or a narrower "
        "communication_data_type sends less a step"
    )
