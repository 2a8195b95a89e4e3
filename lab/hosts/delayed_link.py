"""Network namespaces of one machine, joined by a link of chosen delay and rate: what several machines see of each other.

    with DelayedLink(seconds=0.001, rate=1e9) as link:
        subprocess.Popen([*link.enter(0), "program"])   # at link.addresses[0]
        subprocess.Popen([*link.enter(1), "program"])   # at link.addresses[1]

Real sockets and real packets. Two hosts are joined by a veth pair where the kernel can delay packets itself (netem) or no delay is
asked for; otherwise, since many small kernels lack netem, by a process that carries each packet and holds it back. Needs root and `ip`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PR_SET_TIMERSLACK = 29
_MTU = 60_000  # few large packets: each costs the forwarder the same
_QUEUE_SECONDS = 0.4  # what would wait longer for the wire is dropped, as a full queue does
MAX_HOSTS = 8


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
    """``seconds`` is the latency of one direction, ``rate`` the bits per second each host can send (None: as fast as it goes)."""

    def __init__(self, seconds: float, rate: float | None = None, hosts: int = 2) -> None:
        if not 0 <= seconds <= 1:
            raise ValueError(f"the latency of a link is between 0 and 1 second, got {seconds}")
        if rate is not None and not 1e4 <= rate <= 1e12:
            raise ValueError(f"the rate of a link is between 10 kbit/s and 1 Tbit/s, got {rate:g} bit/s")
        if not 2 <= hosts <= MAX_HOSTS:
            raise ValueError(f"a link joins 2 to {MAX_HOSTS} hosts, got {hosts}")
        reason = why_not()
        if reason:
            raise ValueError(f"cannot make a delayed link: {reason}")
        self.seconds, self.rate, self.hosts = seconds, rate, hosts
        self.namespaces = [f"ladder-{os.getpid()}-{letter}" for letter in "abcdefgh"[:hosts]]
        subnet = os.getpid() % 250 + 1
        self.addresses = [f"10.211.{subnet}.{host + 1}" for host in range(hosts)]
        self.wire = ""  # what carries the packets: "netem", "veth" (no delay), or "forwarder"
        self._forwarder: Any = None
        self._handles_sigterm = False

    def enter(self, host: int) -> list[str]:
        """The command prefix that runs a program on one host."""
        return ["ip", "netns", "exec", self.namespaces[host]]

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told: as when a cable is pulled behind a switch."""
        if self._forwarder is not None:
            os.kill(self._forwarder.pid, signal.SIGUSR1)
        else:
            _ip("-n", self.namespaces[1], "link", "set", "link0", "down")

    def mend(self) -> None:
        if self._forwarder is not None:
            os.kill(self._forwarder.pid, signal.SIGUSR2)
        else:
            _ip("-n", self.namespaces[1], "link", "set", "link0", "up")

    def forwarder_seconds(self) -> float:
        """Processor time the wire has taken from the ranks so far; 0 where the kernel is the wire."""
        if self._forwarder is None:
            return 0.0
        with open(f"/proc/{self._forwarder.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> DelayedLink:
        self._end_on_sigterm()
        try:
            for name in self.namespaces:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            netem = self.hosts == 2 and self._kernel_has_netem()
            if self.hosts == 2 and (netem or self.seconds == 0):
                self._join_by_veth(netem)
            else:
                self._join_by_forwarder()
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
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._handles_sigterm = False

    def _end_on_sigterm(self) -> None:
        """Python dies of SIGTERM without unwinding, and namespaces outlive their maker: let it unwind, as it does after Ctrl-C."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _unwind)
            self._handles_sigterm = True

    def _kernel_has_netem(self) -> bool:
        if shutil.which("tc") is None:
            return False
        command = [*self.enter(0), "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us"]
        found = subprocess.run(command, capture_output=True, check=False).returncode == 0
        if found:
            subprocess.run([*self.enter(0), "tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True, check=False)
        return found

    def _join_by_veth(self, netem: bool) -> None:
        left, right = self.namespaces
        _ip("-n", left, "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", right)
        for host, name in enumerate(self.namespaces):
            _ip("-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "link0")
            _ip("-n", name, "link", "set", "link0", "up")
            shape = ["delay", f"{1e6 * self.seconds:.0f}us", "limit", "100000"] if netem else []
            if self.rate is not None:
                # netem holds each packet for as long as it takes to send; a token bucket lets a burst of a few pass at once.
                rate = ["rate", f"{self.rate:.0f}bit"]
                shape = [*shape, *rate] if netem else [*rate, "burst", "64kb", "latency", f"{1e3 * _QUEUE_SECONDS:.0f}ms"]
            if shape:
                command = ["tc", "qdisc", "replace", "dev", "link0", "root", "netem" if netem else "tbf", *shape]
                done = subprocess.run([*self.enter(host), *command], capture_output=True, text=True, check=False)
                if done.returncode:
                    raise ValueError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        self.wire = "netem" if netem else "veth"

    def _join_by_forwarder(self) -> None:
        devices = {}
        for host, name in enumerate(self.namespaces):
            devices[bytes(int(part) for part in self.addresses[host].split("."))] = _open_tun_in(name)
            _ip("-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "link0")
            _ip("-n", name, "link", "set", "link0", "mtu", str(_MTU), "up")
        context = multiprocessing.get_context("fork")  # the children of a spawn would not inherit the open devices
        self._forwarder = context.Process(target=_forward, args=(devices, self.seconds, self.rate), daemon=True)
        self._forwarder.start()
        for device in devices.values():
            os.close(device)
        self.wire = "forwarder"


def _unwind(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


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


def _forward(devices: dict[bytes, int], seconds: float, rate: float | None) -> None:
    """Each packet leaves its host when the wire is free, takes its length over the rate, and arrives ``seconds`` later."""
    with contextlib.suppress(OSError):
        os.nice(-20)  # a wire has no queue for the processor
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)  # nanoseconds: it shall not oversleep either
    up = True

    def cut(*_: object) -> None:
        nonlocal up
        up = False

    def mend(*_: object) -> None:
        nonlocal up
        up = True

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not its maker's
    signal.signal(signal.SIGUSR1, cut)
    signal.signal(signal.SIGUSR2, mend)
    per_byte = 8 / rate if rate else 0.0
    sources = list(devices.values())
    free = dict.fromkeys(sources, 0.0)  # when the wire out of each host is free again
    held: dict[int, deque[tuple[float, int, bytes]]] = {device: deque() for device in sources}
    while True:
        due = [queue[0][0] for queue in held.values() if queue]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        for device in select.select(sources, [], [], wait)[0]:
            try:
                while True:
                    packet = os.read(device, _MTU + 100)
                    target = devices.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                    now = time.monotonic()
                    if target is None or not up or free[device] > now + _QUEUE_SECONDS:
                        continue
                    free[device] = max(now, free[device]) + len(packet) * per_byte
                    held[device].append((free[device] + seconds, target, packet))
            except BlockingIOError:
                pass
        now = time.monotonic()
        for queue in held.values():
            while queue and queue[0][0] <= now:
                _, target, packet = queue.popleft()
                if up:
                    with contextlib.suppress(OSError):  # as a wire: what a host cannot take is lost, and sent again by TCP
                        os.write(target, packet)
