"""Which ranks are still alive: asked when one is lost and the library that noticed cannot say which.

gloo names a socket at best, and a rank that waits for a healthy one learns nothing about the third that both of them lack. So every
rank keeps a thread with a connection of its own to the run's store. A rank that has lost a peer requests a liveness check there; the
threads answer, also those of ranks that hang in an all-reduce; a rank that does not answer is missing.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Any

PATIENCE_SECONDS = 3.0  # for the answers
_POLL_SECONDS = 0.5  # how often a rank looks whether a check was requested; costs it one small message
_REQUESTED = "requested"


class LivenessCheck:
    """One rank's part. ``store`` must be new to this run; ``address`` is where it is, for messages."""

    def __init__(self, store: Any, rank: int, size: int, address: str) -> None:
        self.rank, self.size, self.address = rank, size, address
        # Used by the thread alone: a store that is out of reach blocks its caller for longer than any time-out.
        self._store = store.clone()
        self._store.set(f"host/{rank}", socket.gethostname())
        self._wake = threading.Event()
        self._over = False
        self._failure: str | None = None
        self._found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="liveness-check", daemon=True)
        self._thread.start()

    def missing(self) -> str:
        """In words, who is lost; to be called once, by a rank that is about to give up. Takes a few seconds at most."""
        self._wake.set()
        try:
            found = self._found.get(timeout=PATIENCE_SECONDS + 2)
        except queue.Empty:
            found = None
        return found or f"the run's store at {self.address} is out of reach (its host or the link to it is down)"

    def leave(self, failure: str | None = None) -> None:
        """End the thread. ``failure``: why this rank fails, for the ranks that lose it now ("": because it lost them)."""
        self._failure, self._over = failure, True
        self._wake.set()
        self._thread.join(1.0)  # a thread whose store is out of reach ends with the process

    def _serve(self) -> None:
        answered = False
        try:
            while not self._over:
                if self._wake.wait(_POLL_SECONDS):
                    self._wake.clear()
                    if not self._over:
                        self._found.put(self._check())
                elif not answered and self._store.check([_REQUESTED]):
                    self._store.set(f"here/{self.rank}", "")
                    answered = True
            if self._failure is not None:
                self._store.set(f"here/{self.rank}", self._failure)
        except RuntimeError:  # whoever hosts the store has left, or is out of reach
            self._found.put(None)

    def _check(self) -> str:
        self._store.set(f"here/{self.rank}", "")
        self._store.set(_REQUESTED, "1")
        silent = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while silent and time.monotonic() < deadline:
            time.sleep(0.1)
            silent = [rank for rank in silent if not self._store.check([f"here/{rank}"])]
        found = []
        for rank in range(self.size):
            failure = "" if rank in silent else self._store.get(f"here/{rank}").decode(errors="replace")
            if failure:
                found.append(f"{self._name(rank)} ended with {failure}")
        joined = [rank for rank in silent if self._store.check([f"host/{rank}"])]
        if joined:
            found.append(f"no answer from {', '.join(map(self._name, joined))} (dead, stopped or cut off)")
        if absent := [f"rank {rank}" for rank in silent if rank not in joined]:
            found.append(f"{', '.join(absent)} never joined")
        return "; ".join(found) or "all ranks still answer: one was too slow for the time-out, or two cannot reach each other"

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._store.get(f'host/{rank}').decode(errors='replace')}"
