"""Two network namespaces of one host, joined by a link of chosen latency: what two machines see of each other.

    with DelayedLink(seconds=0.001) as link:
        subprocess.Popen([*link.enter(0), "program"])   # at link.addresses[0]
        subprocess.Popen([*link.enter(1), "program"])   # at link.addresses[1]

Real sockets, real packets, and a process between that holds each packet back. (The kernel's own tool for it, netem, is missing in
many small kernels.) Needs root and `ip`; one process per link, about 20 us of CPU time per packet.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import select
import shutil
import struct
import subprocess
import time
from collections import deque
from types import TracebackType
from typing import Any

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 60_000  # few large packets: each costs the forwarder the same


def why_not() -> str | None:
    """The reason a link cannot be made here, if there is one."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` (iproute2) is missing"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun is missing"
    return None


class DelayedLink:
    """``seconds`` is the latency of one direction."""

    def __init__(self, seconds: float) -> None:
        if not 0 <= seconds <= 1:
            raise ValueError(f"the latency of a link is between 0 and 1 second, got {seconds}")
        reason = why_not()
        if reason:
            raise ValueError(f"cannot make a delayed link: {reason}")
        self.seconds = seconds
        self.namespaces = [f"ladder-{os.getpid()}-{side}" for side in "ab"]
        subnet = os.getpid() % 250 + 1
        self.addresses = [f"10.211.{subnet}.{side + 1}" for side in range(2)]
        self._forwarder: Any = None

    def enter(self, side: int) -> list[str]:
        """The command prefix that runs a program on one side."""
        return ["ip", "netns", "exec", self.namespaces[side]]

    def __enter__(self) -> DelayedLink:
        try:
            ends = [self._make_side(side) for side in range(2)]
            context = multiprocessing.get_context("fork")  # the children of a spawn would not inherit the open devices
            self._forwarder = context.Process(target=_forward, args=(ends[0], ends[1], self.seconds), daemon=True)
            self._forwarder.start()
            for end in ends:
                os.close(end)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._forwarder is not None:
            self._forwarder.kill()
            self._forwarder.join()
            self._forwarder = None
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def _make_side(self, side: int) -> int:
        name = self.namespaces[side]
        _ip("netns", "add", name)
        device = _open_tun_in(name)
        here, there = self.addresses[side], self.addresses[1 - side]
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", here, "peer", there, "dev", "link0")
        _ip("-n", name, "link", "set", "link0", "mtu", str(_MTU), "up")
        return device


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")


def _open_tun_in(namespace: str) -> int:
    """A device belongs to the namespace in which it was made; the file that moves its packets works from anywhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/var/run/netns/{namespace}") as away:
        if libc.setns(away.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"link0", _IFF_TUN | _IFF_NO_PI))
        finally:
            libc.setns(home.fileno(), _CLONE_NEWNET)
    return device


def _forward(left: int, right: int, seconds: float) -> None:
    with contextlib.suppress(OSError):
        os.nice(-20)  # a wire has no queue for the processor
    other = {left: right, right: left}
    held: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        for device in select.select([left, right], [], [], wait)[0]:
            try:
                while True:
                    packet = os.read(device, _MTU + 100)
                    held.append((time.monotonic() + seconds, other[device], packet))
            except BlockingIOError:
                pass
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, device, packet = held.popleft()
            with contextlib.suppress(OSError):  # as a wire: what the other side cannot take is lost, and sent again by TCP
                os.write(device, packet)
