"""Where work runs: a thin layer over CUDA streams and events, with a twin that records instead, for tests on the CPU.

Names: ``main`` (the only lane, or the MLP's), ``attention`` (the attention lane of two, or attention beside a woven one), ``sum-0``
and ``sum-1`` (all-reduces that run beside the main lane, attention's and the MLP's apart so that neither queues behind the other).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

NAMES = ("main", "attention", "sum-0", "sum-1")


class Streams(Protocol):
    def on(self, name: str) -> Any: ...

    def record(self, name: str, what: str) -> Any: ...

    def wait(self, name: str, event: Any) -> None: ...


class CudaStreams:
    """``main`` is whatever stream is current (under capture: the capturing one); the others are forked from it by events."""

    def __init__(self, device: torch.device, *, priorities: tuple[int, int] = (0, 0)) -> None:
        self._side = {
            "attention": torch.cuda.Stream(device, priority=priorities[0]),
            "sum-0": torch.cuda.Stream(device, priority=priorities[1]),
            "sum-1": torch.cuda.Stream(device, priority=priorities[1]),
        }
        self._device = device

    def _stream(self, name: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if name == "main" else self._side[name]

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        if name == "main":
            yield
        else:
            with torch.cuda.stream(self._side[name]):
                yield

    def record(self, name: str, what: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(name))
        return event

    def wait(self, name: str, event: torch.cuda.Event) -> None:
        self._stream(name).wait_event(event)


class RecordingStreams:
    """Runs everything in order and writes down who waited for what: ``log`` holds (stream, verb, what)."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        yield

    def record(self, name: str, what: str) -> str:
        self.log.append((name, "record", what))
        return what

    def wait(self, name: str, event: str) -> None:
        self.log.append((name, "wait", event))

    def compute(self, name: str, what: str) -> None:
        self.log.append((name, "compute", what))
