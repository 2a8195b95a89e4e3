"""Which ranks are still alive: asked when one is lost and the library that noticed cannot say which.

gloo names a socket at best, and a rank that waits for a healthy one learns nothing about the third that both of them lack. So every
rank keeps a thread with a connection of its own to the run's store. A rank that has lost a peer requests a liveness check there; the
threads answer, also those of ranks that hang in an all-reduce; a rank that does not answer is missing.

A kernel on a GPU waits for its peers for ever, and nobody notices. There the threads watch each other: ``on_silence``.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 3.0  # for the answers
_POLL_SECONDS = 0.5  # how often a rank looks whether a check was requested; costs it one small message
_BEAT_SECONDS = 2.0  # how often a rank that is watched shows itself
_REQUESTED = "requested"
_LEFT = b"left"
ALL_ANSWER = "all ranks still answer"


class LivenessCheck:
    """One rank's part. ``store`` must be new to this run; ``address`` is where it is, for messages. ``on_silence`` is called, by the
    thread, with who has ended or has not been heard of for ``timeout`` seconds."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        address: str,
        *,
        on_silence: Callable[[str], None] | None = None,
        timeout: float = 120.0,
    ) -> None:
        self.rank, self.size, self.address = rank, size, address
        self._on_silence, self._timeout, self._is_watched = on_silence, max(timeout, 3 * _BEAT_SECONDS), on_silence is not None
        self._heard = {other: (b"", time.monotonic()) for other in range(size) if other != rank}  # the last sign and when
        self._beats, self._next_beat = 0, time.monotonic()
        # Used by the thread alone: a store that is out of reach blocks its caller for longer than any time-out.
        self._store = store.clone()
        self._store.set(f"host/{rank}", socket.gethostname())
        self._wake = threading.Event()
        self._over = self._parting = False
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

    def part(self) -> None:
        """This rank is done: it watches no more, and is not waited for."""
        self._on_silence, self._parting = None, True

    def leave(self, failure: str | None = None) -> None:
        """End the thread. ``failure``: why this rank fails, for the ranks that lose it now ("": because it lost them)."""
        self._on_silence = None
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
                if self._parting:
                    self._say_left()
                elif self._on_silence is not None and time.monotonic() >= self._next_beat:
                    self._watch(self._on_silence)
            if self._failure is not None:
                self._store.set(f"here/{self.rank}", self._failure)
            else:
                self._say_left()
        except RuntimeError:  # whoever hosts the store has left, or is out of reach
            self._found.put(None)
            if (tell := self._on_silence) is not None:
                tell(f"the run's store at {self.address} is out of reach (its host or the link to it is down)")

    def _say_left(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._store.set(f"beat/{self.rank}", _LEFT)

    def _watch(self, tell: Callable[[str], None]) -> None:
        """Show that this rank is there, and look for the others."""
        now = time.monotonic()
        if (
            now > self._next_beat + self._timeout
        ):  # this rank itself stood still, as in a suspended job: all get their time anew
            self._heard = {other: (last, now) for other, (last, _) in self._heard.items()}
        self._beats, self._next_beat = self._beats + 1, now + _BEAT_SECONDS
        self._store.set(f"beat/{self.rank}", str(self._beats))
        for other, (last, since) in self._heard.items():
            key, end = f"beat/{other}", f"here/{other}"
            if self._store.check([end]) and (failure := self._store.get(end).decode(errors="replace")):
                tell(f"{self._name(other)} ended with {failure}")
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat != last or beat == _LEFT:
                self._heard[other] = (beat, now)
            elif now - since > self._timeout:
                tell(f"{self._name(other)} has not been heard of for {self._timeout:.0f} s (dead, stopped or cut off)")

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
        return "; ".join(found) or f"{ALL_ANSWER}: one was too slow for the time-out, or two cannot reach each other"

    def _name(self, rank: int) -> str:
        host = self._store.get(f"host/{rank}").decode(errors="replace") if self._store.check([f"host/{rank}"]) else "some host"
        return f"rank {rank} on {host}"
