"""Small messages between ranks on CPU hosts, without helper threads.

gloo hands every operation to its own threads; on a host whose cores all compute, waking them costs about a millisecond each time
(measured: 1.1 ms for 48 KB between two processes of one host, where a plain socket takes 0.04 ms). Here a tensor is written
into the kernel's socket buffer at ``send`` and read at ``receive``: in between the kernel moves it while the rank computes.

Each pair of ranks has one connection. All ranks start the same operations in the same order, so messages need no tags; a header
carries number and size all the same, so that ranks that disagree (another model, another wiring) stop with a message.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HEADER = struct.Struct("!QQ")  # number of the message, bytes that follow
_SECRET_BYTES = 16
_MOST_STRANGERS = 64  # connections that have not said who they are; one more, and the oldest is closed


class PeerLost(RuntimeError):
    """Another rank died, was stopped, or cannot be reached."""


class _Peer:
    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.address = connection.getpeername()[0]
        self.sent = 0
        self.outbox: deque[memoryview] = deque()
        self.header = bytearray(_HEADER.size)
        self.received = 0  # whole messages
        self.filled = 0  # bytes of the message being read, header included
        self.expected: deque[memoryview] = deque()  # where the next messages go

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.address}"


class PeerSockets:
    """Connections of one rank to all others. Made by all ranks together, through the group's store."""

    def __init__(self, store: dist.Store, rank: int, size: int, host: str, timeout: float) -> None:
        """``host`` is the address at which the other ranks reach this one; nothing listens on any other."""
        self.rank, self.size, self.timeout = rank, size, timeout
        self._peers: dict[int, _Peer] = {}
        self._started = 0
        deadline = time.monotonic() + timeout
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            secret = secrets.token_bytes(_SECRET_BYTES)  # whoever connects must have read it in the store
            store.set(_key(rank), json.dumps([*server.getsockname()[:2], secret.hex()]))
            for peer in range(rank):
                try:
                    address, port, word = _listening(store.get(_key(peer)))
                except (TypeError, ValueError, RecursionError) as error:  # whoever reaches the store can write to it
                    raise PeerLost(
                        f"rank {rank} finds no address of rank {peer} in the run's store, but something else"
                    ) from error
                try:
                    connection = socket.create_connection((address, port), max(0.1, deadline - time.monotonic()))
                    connection.sendall(word + rank.to_bytes(4, "big"))
                except (OSError, ValueError, OverflowError) as error:
                    raise PeerLost(f"rank {rank} cannot reach rank {peer} at {address}:{port}: {error}") from error
                self._add(peer, connection)
            for peer, connection in _greeted(server, secret, range(rank + 1, size), deadline):
                self._add(peer, connection)
        missing = sorted(set(range(size)) - {rank} - self._peers.keys())
        if missing:
            raise PeerLost(f"rank {rank} waited {timeout:.0f} s for rank {missing[0]} to connect to {host}")

    def _add(self, rank: int, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
            self._peers[rank] = _Peer(rank, connection)
        except OSError as error:
            raise PeerLost(f"rank {self.rank} lost rank {rank} as they connected: {error}") from error

    def start_all_gather(self, local: Tensor) -> tuple[int, list[Tensor]]:
        """Send ``local`` to every rank. Returns the number to ``receive`` and a tensor per rank, the others' filled by then."""
        local = local.contiguous()
        payload = _bytes_of(local)
        parts = [local if rank == self.rank else torch.empty_like(local) for rank in range(self.size)]
        for peer in self._peers.values():
            peer.outbox += [memoryview(_HEADER.pack(peer.sent, payload.nbytes)), payload]
            peer.sent += 1
            peer.expected.append(_bytes_of(parts[peer.rank]))
            self._write(peer)
        self._started += 1
        return self._started, parts

    def receive(self, count: int) -> None:
        """Until the first ``count`` messages of every rank are there. Meanwhile everything else moves that can."""
        self._pump(lambda peer: peer.received >= count)

    def drain(self) -> None:
        """Until every message started is there and all of ours are in the kernel's hands.

        To be called before a rank waits for anything but these sockets: there nobody would send the rest of its messages, nor read
        what its peers cannot get rid of.
        """
        self._pump(lambda peer: not peer.expected and not peer.outbox)

    def _pump(self, done: Callable[[_Peer], bool]) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            for peer in self._peers.values():
                self._write(peer)
                self._read(peer)
            late = [peer for peer in self._peers.values() if not done(peer)]
            if not late:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerLost(
                    f"rank {self.rank} waited {self.timeout:.0f} s for {late[0]}: it is stopped, or the link is down"
                )
            poll = select.poll()
            for peer in self._peers.values():
                if events := (select.POLLIN if peer.expected else 0) | (select.POLLOUT if peer.outbox else 0):
                    poll.register(peer.connection, events)
            poll.poll(1e3 * min(left, 1.0))

    def _write(self, peer: _Peer) -> None:
        """As much as the kernel takes now; the rest goes with the next call."""
        try:
            while peer.outbox:
                sent = peer.connection.sendmsg(list(peer.outbox)[:2])
                while peer.outbox and sent >= peer.outbox[0].nbytes:
                    sent -= peer.outbox.popleft().nbytes
                if sent:
                    peer.outbox[0] = peer.outbox[0][sent:]
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"rank {self.rank} lost its connection to {peer}: {error}") from error

    def _read(self, peer: _Peer) -> None:
        """Every message that has a place to go and has arrived."""
        try:
            while peer.expected:
                target, body = peer.expected[0], peer.filled - _HEADER.size  # bytes of the message after its header
                got = peer.connection.recv_into(memoryview(peer.header)[peer.filled :] if body < 0 else target[body:])
                if got == 0:
                    raise PeerLost(f"rank {self.rank} lost {peer}: it closed its connection (it stopped or died)")
                peer.filled += got
                if peer.filled == _HEADER.size:
                    self._check(peer, target.nbytes)
                if peer.filled == _HEADER.size + target.nbytes:
                    peer.expected.popleft()
                    peer.filled, peer.received = 0, peer.received + 1
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"rank {self.rank} lost its connection to {peer}: {error}") from error

    def _check(self, peer: _Peer, size: int) -> None:
        number, length = _HEADER.unpack(peer.header)
        if (number, length) != (peer.received, size):
            raise PeerLost(
                f"{peer} sent message {number} of {length} bytes where rank {self.rank} expects message {peer.received} of {size}: "
                f"the ranks run different models, wirings or inputs"
            )

    def close(self) -> None:
        for peer in self._peers.values():
            peer.connection.close()
        self._peers.clear()


def reachable_address(toward: str, port: int) -> str:
    """This host's address on the interface that leads to ``toward``; no packet is sent to find out."""
    family, kind, protocol, _, address = socket.getaddrinfo(toward, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _key(rank: int) -> str:
    return f"ladder_residual/sockets/{rank}"


def _listening(said: bytes) -> tuple[str, int, bytes]:
    """Where a rank listens, and its secret."""
    address, port, word = json.loads(said)
    return str(address), int(port), bytes.fromhex(word)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _ready(connections: Iterable[socket.socket], seconds: float) -> list[socket.socket]:
    """Those that can be read. Not ``select``, which knows none of a process's files after the first 1024."""
    poll, by_file = select.poll(), {connection.fileno(): connection for connection in connections}
    for file in by_file:
        poll.register(file, select.POLLIN)
    return [by_file[file] for file, _ in poll.poll(1e3 * seconds)]


def _greeted(
    server: socket.socket, secret: bytes, expected: Iterable[int], deadline: float
) -> Iterator[tuple[int, socket.socket]]:
    """Each ``expected`` rank and its connection, as they present the secret; fewer if the deadline passes.

    All connections are listened to at once: strangers that say nothing, or something else, hold nobody up.
    """
    missing = set(expected)
    heard: dict[socket.socket, bytes] = {}  # of whom is not known yet, oldest first
    server.setblocking(False)
    try:
        while missing and (left := deadline - time.monotonic()) > 0:
            for connection in _ready([server, *heard], left):
                if connection is server:
                    with suppress(OSError):  # gone before it was accepted
                        newcomer = server.accept()[0]
                        newcomer.setblocking(False)
                        heard[newcomer] = b""
                    if len(heard) > _MOST_STRANGERS:
                        _forget(heard, next(iter(heard)))
                elif connection in heard:
                    try:
                        data = connection.recv(_SECRET_BYTES + 4 - len(heard[connection]))
                    except OSError:
                        data = b""
                    heard[connection] += data
                    if data and len(heard[connection]) < _SECRET_BYTES + 4:
                        continue
                    word, rank = heard[connection][:_SECRET_BYTES], int.from_bytes(heard[connection][_SECRET_BYTES:], "big")
                    if data and hmac.compare_digest(word, secret) and rank in missing:
                        del heard[connection]
                        missing.remove(rank)
                        yield rank, connection
                    else:
                        _forget(heard, connection)
    finally:
        for connection in list(heard):
            _forget(heard, connection)


def _forget(heard: dict[socket.socket, bytes], connection: socket.socket) -> None:
    del heard[connection]
    connection.close()
