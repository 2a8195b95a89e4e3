"""Faults of ranks: signals, memory, software that differs, clocks that differ."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CGROUP_V1 = Path("/sys/fs/cgroup/memory")
_CGROUP_V2 = Path("/sys/fs/cgroup")

# Read by Python at start in every process that has its directory on PYTHONPATH; changes only the rank it is meant for.
_OTHER_VERSION = """
import os
if os.environ.get("RANK") == "{rank}":
    from ladder_residual.common import version
    version.__version__ = "0.0.1.other"
"""
_OTHER_CLOCK = """
import os, time
if os.environ.get("RANK") == "{rank}":
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + {seconds}
    time.time_ns = lambda: real_ns() + {seconds} * 10**9
"""


def limit_memory(pid: int) -> None:
    """From now on the process gets no more address space: its next large allocation fails."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))


def why_no_cgroup() -> str | None:
    """The reason the kernel's out-of-memory killer cannot be provoked here, if there is one."""
    if os.geteuid() != 0:
        return "making a memory cgroup needs root"
    try:
        with _cgroup():
            return None
    except OSError as error:
        return f"no memory cgroup can be made: {error}"


@contextmanager
def starving(pid: int) -> Iterator[None]:
    """The process in a memory cgroup of its own that is full at once: the kernel kills it as it would on a host out of memory."""
    with _cgroup() as group:
        (group / "cgroup.procs").write_text(str(pid))
        yield


@contextmanager
def _cgroup() -> Iterator[Path]:
    v1 = (_CGROUP_V1 / "memory.limit_in_bytes").exists()
    group = (_CGROUP_V1 if v1 else _CGROUP_V2) / f"ladder-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(1 << 20))
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


class KillAt:
    """An audit hook: SIGKILL to its own process just before the n-th time it creates, renames, links or removes something under
    ``folder`` (0: never); ``count`` says how often that was."""

    EVENTS = ("os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir")

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder, self.count = number, str(folder), 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._changes(event, arguments):
            self.count += 1
            if self.count == self.number:
                os.kill(os.getpid(), signal.SIGKILL)

    def _changes(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "ctypes.dlsym":
            return arguments[1] == "renameat2"  # looked up to be called
        if (event == "open" and not (arguments[2] or 0) & os.O_CREAT) or event not in ("open", *self.EVENTS):
            return False
        paths = [os.fspath(argument) for argument in arguments if isinstance(argument, str | os.PathLike)]
        return any(self.folder in path or not os.path.isabs(path) for path in paths)  # relative to an open directory


def other_version(directory: Path, rank: int) -> dict[str, str]:
    """Environment in which one rank believes it runs another version of this package."""
    return _site(directory / "version", _OTHER_VERSION.format(rank=rank))


def other_clock(directory: Path, rank: int, seconds: int) -> dict[str, str]:
    """Environment in which one rank's wall clock is ``seconds`` ahead."""
    return _site(directory / "clock", _OTHER_CLOCK.format(rank=rank, seconds=seconds))


def other_uptime(seconds: int) -> list[str]:
    """Command prefix under which a program's monotonic clock is ``seconds`` ahead, as on a host that was booted earlier; empty
    where the kernel or the user cannot do that."""
    prefix = ["unshare", "--time", "--fork", "--monotonic", str(seconds), "--boottime", str(seconds)]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        return []
    return prefix


def _site(directory: Path, code: str) -> dict[str, str]:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))}
