"""Which rank is lost: named by every rank that is left, also by one that waited for a third."""

import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ladder_residual.distributed.liveness import LivenessCheck
from ladder_residual.distributed.sockets import PeerLost
from ladder_residual.distributed.world import distributed
from tests.ranks import free_port, start_ranks

HOST = socket.gethostname()
TIMEOUT = 2.0
SILENCE = 6.0  # the least: a rank shows itself every two seconds


def _survive(connection, rank, scene, victim, launched):
    """Three ranks; 0 and 1 all-reduce with each other, 1 and 2 too, and something becomes of one of them."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(launched)
    if scene == "absent" and rank == victim:
        time.sleep(60)
    start = time.monotonic()
    try:
        with distributed("cpu", timeout=TIMEOUT) as world:
            first, second = (dist.new_group(pair, timeout=timedelta(seconds=TIMEOUT)) for pair in ([0, 1], [1, 2]))
            world.barrier()
            start = time.monotonic()
            if rank == victim and scene == "failing":
                raise KeyError("a mistake")
            if rank == victim:
                os.kill(os.getpid(), signal.SIGSTOP if scene == "stopped" else signal.SIGKILL)
            mine = {0: first, 1: first if victim == 0 else second, 2: second}[rank]
            dist.all_reduce(torch.ones(1), group=mine)
        connection.send(("went on", 0.0))
    except (PeerLost, KeyError) as error:
        connection.send((str(error), time.monotonic() - start))


def messages(scene, victim=2, launched=True):
    """What the other ranks say, and after how many seconds. ``launched``: the store is a launcher's, not rank 0's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if launched else None
    port = store.port if store is not None else free_port()
    pipes, processes = start_ranks(3, _survive, scene, victim, launched, port=port)
    try:
        found = {}
        for rank in {0, 1, 2} - {victim}:
            assert pipes[rank].poll(60), f"rank {rank} says nothing"
            found[rank] = pipes[rank].recv()
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def _watch(connection, rank, scene):
    """Two ranks that wait for each other where no time-out reaches, as in a kernel on a GPU."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    check = LivenessCheck(store, rank, 2, "here", on_silence=lambda text: (connection.send(text), os._exit(3)), timeout=SILENCE)
    if scene == "done" and rank == 1:
        check.part()
    if scene == "failed" and rank == 1:
        check.leave("ValueError: no")
    time.sleep(SILENCE + 4 if scene == "done" else 60)
    check.leave()
    connection.send("went on")


@pytest.mark.parametrize(
    ("scene", "message"),
    [
        ("killed", f"rank 1 on {HOST} has not been heard of for 6 s (dead, stopped or cut off)"),
        ("failed", f"rank 1 on {HOST} ended with ValueError: no"),
        pytest.param("stopped", f"rank 1 on {HOST} has not been heard of for 6 s", marks=pytest.mark.slow),
        ("done", "went on"),
    ],
)
def test_a_rank_that_no_time_out_reaches_learns_of_the_lost_one(scene, message):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = start_ranks(2, _watch, scene, port=store.port)
    try:
        if scene in ("killed", "stopped"):
            assert wait_until(lambda: store.check(["beat/1"]))
            os.kill(processes[1].pid, signal.SIGSTOP if scene == "stopped" else signal.SIGKILL)
        assert pipes[0].poll(30)
        assert message in pipes[0].recv()
    finally:
        for process in processes:
            process.kill()
            process.join()


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(
    ("scene", "victim"),
    [("killed", 2), pytest.param("stopped", 2, marks=pytest.mark.slow), pytest.param("killed", 0, marks=pytest.mark.slow)],
)
def test_every_rank_names_the_lost_one(scene, victim):
    for rank, (text, seconds) in messages(scene, victim).items():
        lost = f"no answer from rank {victim} on {HOST} (dead, stopped or cut off)"
        assert f"rank {rank} of 3 on {HOST} lost its peers: {lost}: " in text
        assert seconds < 2 * TIMEOUT + 10


def test_a_rank_that_fails_is_named_with_its_reason():
    text, _ = messages("failing")[1]
    assert f"rank 1 of 3 on {HOST} lost its peers: rank 2 on {HOST} ended with KeyError: 'a mistake': " in text


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named():
    for text, _ in messages("absent").values():
        assert "lost its peers: rank 2 never joined: " in text


@pytest.mark.slow
def test_with_the_store_gone_its_address_is_named():
    """Without a launcher rank 0 holds the store, so that nobody can be asked any more."""
    text, seconds = messages("killed", victim=0, launched=False)[1]
    assert f"rank 1 of 3 on {HOST} lost its peers: the run's store at 127.0.0.1:" in text
    assert seconds < 2 * TIMEOUT + 10
