"""Where work runs: a thin layer over CUDA streams and events, with a twin for the CPU that records instead.

Names: ``main`` (the only chain, or the MLP's), ``attention`` (the attention chain, or attention beside an interleaved chain),
``reduce-attention`` and ``reduce-mlp`` (all-reduces beside the main stream, apart so that neither queues behind the other).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Streams(Protocol):
    def on(self, name: str, what: str) -> Any:
        """A context whose work, called ``what`` in a log, runs on stream ``name``."""
        ...

    def record(self, name: str, what: str) -> Any: ...

    def wait(self, name: str, event: Any) -> None: ...


class CudaStreams:
    """``main`` is the current stream (under capture: the capturing one); the others are forked from it by events."""

    def __init__(self, device: torch.device, *, priorities: tuple[int, int] = (0, 0)) -> None:
        attention, reduce = priorities
        self._side = {
            "attention": torch.cuda.Stream(device, priority=attention),
            "reduce-attention": torch.cuda.Stream(device, priority=reduce),
            "reduce-mlp": torch.cuda.Stream(device, priority=reduce),
        }
        self._device = device

    def _stream(self, name: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if name == "main" else self._side[name]

    @contextmanager
    def on(self, name: str, what: str) -> Iterator[None]:
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
    """Runs everything in order; ``log`` holds (stream, verb, what)."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []

    @contextmanager
    def on(self, name: str, what: str) -> Iterator[None]:
        self.log.append((name, "compute", what))
        yield

    def record(self, name: str, what: str) -> str:
        self.log.append((name, "record", what))
        return what

    def wait(self, name: str, event: str) -> None:
        self.log.append((name, "wait", event))
