"""Messages over sockets: nothing locks up, however full the buffers are and whoever else connects."""

import json
import os
import resource
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress

import pytest
import torch
import torch.distributed as dist

from ladder_residual.distributed.sockets import PeerLost, PeerSockets
from tests.ranks import run_on_ranks, start_ranks


def full_buffers(world, size, in_flight, buffer):
    """Messages far larger than what the kernel takes, several under way, and something else to wait for after each all-reduce."""
    for peer in world.sockets._peers.values():
        peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    reducer = world.reducer("async", small_allreduce_bytes=1 << 30)
    worst = 0.0
    for turn in range(4):
        pendings = [reducer.start(torch.full((size,), float(world.rank + k + turn))) for k in range(in_flight)]
        for k, pending in enumerate(pendings):
            expected = sum(rank + k + turn for rank in range(world.size))
            worst = max(worst, (pending.wait() - expected).abs().max().item())
            world.barrier()
    return worst


@pytest.mark.parametrize(("ranks", "in_flight"), [(2, 1), (2, 8), (3, 4)])
def test_full_socket_buffers_never_lock_the_ranks(ranks, in_flight):
    assert run_on_ranks(ranks, full_buffers, 1 << 20, in_flight, 50_000) == [0.0] * ranks


def _started(connection, rank, strangers, timeout):
    """Rank 1 lets strangers go first: they connect to rank 0 as soon as it listens."""
    from ladder_residual.distributed import world as module

    connect, opened = module._connect, []

    def late(store, *rest):
        if rank == 1:
            address = tuple(json.loads(store.get("ladder_residual/sockets/0"))[:2])
            for words in strangers:
                opened.append(socket.create_connection(address))
                opened[-1].sendall(words)
        return connect(store, *rest)

    module._connect = late
    start = time.monotonic()
    try:
        with module.distributed("cpu", timeout=timeout) as world:
            connection.send((time.monotonic() - start, world.check_same("the number", "1")))
    except PeerLost as error:
        connection.send(str(error))


@pytest.mark.parametrize(
    "strangers",
    [[b""] * 6, [b"x" * 19, b"GET / HTTP/1.0\r\n\r\n" * 9, bytes(16) + b"\0\0\0\1", b""], [b""] * 200],
    ids=["silent", "garbage", "many"],
)
def test_strangers_do_not_hold_up_a_start(strangers):
    pipes, processes = start_ranks(2, _started, strangers, 60)
    said = [pipe.recv() if pipe.poll(60) else "nothing" for pipe in pipes]
    for process in processes:
        process.join(10)
        process.kill()
    assert all(isinstance(answer, tuple) and answer[0] < 15 for answer in said), said


def test_a_rank_that_never_comes_is_missed_at_the_deadline():
    """Strangers that go on talking do not move it."""
    store, start = dist.HashStore(), time.monotonic()
    over = threading.Event()

    def talk():
        address = tuple(json.loads(store.get("ladder_residual/sockets/0"))[:2])
        while not over.wait(0.1):
            with suppress(OSError), socket.create_connection(address) as stranger:
                stranger.sendall(b"?" * 20)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        with pytest.raises(PeerLost, match="rank 0 waited 1 s for rank 1 to connect"):
            PeerSockets(store, 0, 2, "127.0.0.1", 1.0)
    finally:
        over.set()
        thread.join()
    assert time.monotonic() - start < 4


def _connected(size, timeout=10.0):
    """The sockets of ``size`` ranks, each made by a thread of this process."""
    store, made = dist.HashStore(), {}

    def make(rank):
        made[rank] = PeerSockets(store, rank, size, "127.0.0.1", timeout)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(size)]


def test_a_process_with_a_thousand_open_files_has_sockets_too():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with ExitStack() as files:
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        both = _connected(2)
        started = [sockets.start_all_gather(torch.full((1 << 20,), float(sockets.rank))) for sockets in both]
        threads = [threading.Thread(target=sockets.drain) for sockets in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for sockets in both:
            sockets.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(torch.equal(parts[rank], torch.full((1 << 20,), float(rank))) for _, parts in started for rank in range(2))


def test_a_peer_that_resets_its_connection_as_it_joins_is_named(monkeypatch):
    """It knew the secret, and died: the connection is of nobody any more."""
    store = dist.HashStore()

    def join_and_die():
        address, port, secret = json.loads(store.get("ladder_residual/sockets/0"))
        with socket.create_connection((address, port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(bytes.fromhex(secret) + (1).to_bytes(4, "big"))
            assert greeted.wait(10)

    greeted, add = threading.Event(), PeerSockets._add

    def add_late(self, rank, connection):
        greeted.set()
        thread.join()
        add(self, rank, connection)

    thread = threading.Thread(target=join_and_die)
    thread.start()
    monkeypatch.setattr(PeerSockets, "_add", add_late)
    with pytest.raises(PeerLost, match="rank 0 lost rank 1 as they connected"):
        PeerSockets(store, 0, 2, "127.0.0.1", 10.0)


@pytest.mark.parametrize(
    "left",
    [
        b"?",
        b"\xff\xfe",
        b"7",
        b"[1, 2]",
        b"[" * 100_000,
        b'["127.0.0.1", 1, 5]',
        b'["127.0.0.1", 1, "zz"]',
        b'["127.0.0.1", "x", "00"]',
    ],
    ids=["text", "bytes", "number", "short", "deep", "secret", "hex", "port"],
)
def test_a_store_that_somebody_else_wrote_to_is_one_line(left):
    """torchrun's store is open to whoever can reach its port."""
    store = dist.HashStore()
    store.set("ladder_residual/sockets/0", left)
    with pytest.raises(PeerLost, match="rank 1 finds no address of rank 0 in the run's store"):
        PeerSockets(store, 1, 2, "127.0.0.1", 1.0)


@pytest.mark.parametrize("address", [("127.0.0.1", 1), ("127.0.0.1", 99_999), ("a\0b", 1), ("a" * 70, 1)])
def test_an_address_that_leads_nowhere_is_one_line(address):
    store = dist.HashStore()
    store.set("ladder_residual/sockets/0", json.dumps([*address, "00"]))
    with pytest.raises(PeerLost, match="rank 1 cannot reach rank 0 at"):
        PeerSockets(store, 1, 2, "127.0.0.1", 1.0)
