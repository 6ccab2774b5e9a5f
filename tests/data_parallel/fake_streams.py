"""Streams, events and collectives of an accelerator that is not there: who has waited for what, by names.

A stream knows everything that was put on it and everything that it has waited for. Tensors are torch's `meta` ones:
real autograd runs real hooks, nothing has a value, and whoever reads one on the host gets an error.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist


class FakeStream:
    """A queue of work; `seen` are the names of all that is done before whatever is put on it next."""

    ids = itertools.count()

    def __init__(self, device: object = None) -> None:
        self.stream_id = next(self.ids)
        self.seen: set[str] = set()
        self._outer: list[FakeStream] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.seen |= event.seen

    def __enter__(self) -> FakeStream:
        self._outer.append(FakeDevice.current)
        FakeDevice.current = self
        return self

    def __exit__(self, *_: object) -> None:
        FakeDevice.current = self._outer.pop()


class FakeEvent:
    """What a stream had done when the event was recorded."""

    def __init__(self, device: object = None, enable_timing: bool = False) -> None:
        self.seen: set[str] = set()

    def record(self, stream: FakeStream) -> None:
        self.seen = set(stream.seen)

    def synchronize(self) -> None:
        raise AssertionError("the host waited for the device")


@dataclass
class FakeWork:
    """A collective on a stream of its own: it starts when its launching stream has come so far."""

    name: str
    seen_at_launch: set[str]
    tensors: list[weakref.ref[torch.Tensor]]
    waited_on: list[FakeStream] = field(default_factory=list)
    lost_memory: bool = False

    def wait(self) -> None:
        self.lost_memory |= any(tensor() is None for tensor in self.tensors)
        self.waited_on.append(FakeDevice.current)
        FakeDevice.current.seen |= {self.name, *self.seen_at_launch}


class FakeDevice:
    """Stands in for torch's streams and torch.distributed's collectives while `monkeypatch` lasts."""

    current: FakeStream

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
        self.main = FakeDevice.current = FakeStream()
        self.works: list[FakeWork] = []
        monkeypatch.setattr(torch, "Stream", FakeStream)
        monkeypatch.setattr(torch, "Event", FakeEvent)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: FakeDevice.current)
        monkeypatch.setattr(torch.accelerator, "synchronize", FakeEvent.synchronize)
        monkeypatch.setattr(dist, "get_backend", lambda group: backend)
        for place, name in (
            (dist, "all_reduce"),
            (dist, "all_to_all_single"),
            ("megatron.data_parallel.reduce_scatter", "reduce_scatter"),
            ("megatron.data_parallel.reduce_scatter", "all_gather"),
            ("megatron.data_parallel.param_gather", "all_gather"),
        ):
            start = self._started(name)
            if isinstance(place, str):
                monkeypatch.setattr(f"{place}.{name}", start)
            else:
                monkeypatch.setattr(place, name, start)

    def _started(self, kind: str):
        def start(*tensors, group=None, async_op=False, op=None):
            assert async_op, f"{kind} would block the host"
            # A view is as alive as what it is a view of.
            owners = [weakref.ref(each if each._base is None else each._base) for each in tensors]
            work = FakeWork(f"{kind} {len(self.works)}", set(FakeDevice.current.seen), owners)
            self.works.append(work)
            return work

        return start

    def note(self, name: str) -> None:
        """Put work on the current stream."""
        FakeDevice.current.seen.add(name)

    def use(self, stream: FakeStream) -> None:
        """Make `stream` the current one from here on."""
        FakeDevice.current = stream
