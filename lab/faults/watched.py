"""A run under observation: its processes, ports, shared memory and files, and what is left of them afterwards. Linux only.

Every process of a run inherits a mark in its environment, so it is found wherever a launcher has put it. Temporary files go to a
directory of the run's own.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_MARK = "LADDER_WATCHED"
_LISTENING = "0A"
_KILLED_WITHIN_S = 10.0  # a loaded machine takes a while to bury what was killed
_NAMESPACES = Path("/run/netns")  # where `ip netns` keeps them


@dataclass
class Traces:
    """What a run held on to at some moment."""

    ports: set[tuple[str, int]] = field(default_factory=set)  # with the network namespace they are in, as the kernel names it
    shared_memory: set[str] = field(default_factory=set)


class WatchedRun:
    """One command (or one per host), started with a mark; ends with everything it started when the block is left."""

    def __init__(
        self, commands: Sequence[Sequence[str]], directory: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.directory = directory
        self.temporary = Path(tempfile.mkdtemp(prefix="tmp-", dir=directory))
        self.started = time.monotonic()
        self.processes: list[subprocess.Popen[str]] = []
        self.forks: dict[int, int] = {}  # pid -> rank
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(directory / "compiled")}  # kept on purpose, and not a trace of a run
        marked = os.environ | {_MARK: self.mark, "TMPDIR": str(self.temporary)} | caches | dict(environment or {})
        self.outputs = [directory / f"output-{index}.txt" for index in range(len(commands))]
        for command, output in zip(commands, self.outputs, strict=True):
            with output.open("w") as sink:
                self.processes.append(
                    subprocess.Popen(command, stdout=sink, stderr=sink, text=True, env=marked, start_new_session=True)
                )

    def __enter__(self) -> WatchedRun:
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + _KILLED_WITHIN_S
        while (pids := self.pids()) and time.monotonic() < deadline:  # again: one may have forked, and an orphan ends later
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for process in self.processes:
            process.wait()

    def pids(self) -> list[int]:
        """Every living process of this run."""
        needle = f"{_MARK}={self.mark}".encode()
        return [pid for pid in _all_pids() if needle in _environment(pid) and not _is_zombie(pid)]

    def ranks(self) -> dict[int, int]:
        """Rank -> pid of those that have been started. A rank's own helpers inherit its number: its launcher's child is meant. Where
        ranks are forks of the command, which show its environment and not their own, they are told by their order."""
        found: dict[int, int] = {}
        for pid in sorted(self.pids()):
            variables = dict(entry.split(b"=", 1) for entry in _environment(pid).split(b"\0") if b"=" in entry)
            if b"LOCAL_RANK" in variables:
                found.setdefault(int(variables[b"RANK"]), pid)
        if found:
            return found
        commands = {process.pid: _command_line(process.pid) for process in self.processes}
        forks = [pid for pid in self.pids() if _command_line(pid) == commands.get(_parent(pid), b"")]
        for pid in sorted(forks, key=_start_time):
            self.forks.setdefault(pid, len(self.forks))
        return {self.forks[pid]: pid for pid in forks}

    def wait_for(self, condition: Callable[[], bool], within: float, what: str) -> None:
        deadline = time.monotonic() + within
        while not condition():
            if any(process.poll() is not None for process in self.processes):
                raise RuntimeError(f"the run ended before {what}:\n{self.text()[-2000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: not within {within:.0f} s:\n{self.text()[-2000:]}")
            time.sleep(0.02)

    def wait_for_a_moment(self, chance: random.Random, startup: float, done: Callable[[], int], work: int) -> str:
        """Any moment of a run: sometimes within its ``startup`` seconds, mostly after a random part of its ``work``; in words."""
        began = time.monotonic()
        if chance.random() < 0.3:
            seconds = chance.uniform(0, startup)
            while time.monotonic() - began < seconds and not done():
                time.sleep(0.01)
        else:
            part = chance.randrange(1, work)
            while done() < part and any(process.poll() is None for process in self.processes):
                time.sleep(0.01)
        return f"{time.monotonic() - began:.1f} s after its start, after {done()} of {work}"

    def end(self, within: float) -> float | None:
        """Seconds until every command has ended; None if one has not ``within`` so many."""
        start = time.monotonic()
        for process in self.processes:
            try:
                process.wait(max(0.01, start + within - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
        return time.monotonic() - start

    def exit_codes(self) -> list[int | None]:
        return [process.returncode for process in self.processes]

    def text(self) -> str:
        """All that the commands have printed."""
        return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in self.outputs)

    def errors(self) -> list[str]:
        return [line for line in self.text().splitlines() if line.startswith("error: ")]

    def traces(self) -> Traces:
        found = Traces()
        for pid in self.pids():
            found.ports |= _listening_ports(pid)
            found.shared_memory |= _shared_memory(pid)
        return found

    def _running(self, held: Traces) -> list[str]:
        """A killed process loses its environment, by which it is found, before its sockets close."""
        listening = {namespace: _listening_in(namespace) for namespace, _ in held.ports}
        ports = [f"port {port}" for namespace, port in sorted(held.ports) if port in listening[namespace]]
        return [f"process {pid}" for pid in self.pids()] + ports

    def left_over(self, held: Traces, grace: float = 10.0) -> list[str]:
        """What should be gone and is not, in words; processes and ports get ``grace`` seconds to vanish."""
        deadline = time.monotonic() + grace
        while (found := self._running(held)) and time.monotonic() < deadline:
            time.sleep(0.1)
        found += [f"shared memory {path}" for path in sorted(held.shared_memory) if Path(path).exists()]
        found += [f"file {path.relative_to(self.directory)}" for path in sorted(self.temporary.rglob("*"))]
        return found


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or somebody else's
        return b""


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[:1] in ([], ["Z"])


def _parent(pid: int) -> int:
    return int((_stat(pid) or ["0"] * 2)[1])


def _start_time(pid: int) -> tuple[int, int]:
    return int((_stat(pid) or ["0"] * 20)[19]), pid


def _listening_ports(pid: int) -> set[tuple[str, int]]:
    """With the process's own network namespace."""
    inodes, ports = set(), set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{pid}/ns/net")
            listeners = _listeners(Path(f"/proc/{pid}/net/{table}").read_text())
            ports |= {(namespace, port) for inode, port in listeners if inode in inodes}
    return ports


def _listeners(table: str) -> list[tuple[str, int]]:
    """(inode, port) of the sockets that listen, of a table as /proc/net/tcp is one."""
    rows = [line.split() for line in table.splitlines()]
    return [(row[9], int(row[1].rpartition(":")[2], 16)) for row in rows if row[3:4] == [_LISTENING]]


def _listening_in(namespace: str) -> set[int]:
    """Ports that somebody listens on in a network namespace now; one that is gone has none."""
    tables = ["/proc/net/tcp", "/proc/net/tcp6"]
    if namespace == os.readlink("/proc/self/ns/net"):
        texts = [Path(table).read_text() for table in tables if Path(table).exists()]
    else:
        made = [path for path in _NAMESPACES.glob("*") if f"net:[{path.stat().st_ino}]" == namespace]
        command = ["ip", "netns", "exec", made[0].name, "cat", *tables] if made else ["true"]
        texts = [subprocess.run(command, capture_output=True, text=True, check=False).stdout]
    return {port for text in texts for _, port in _listeners(text)}


def _shared_memory(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
