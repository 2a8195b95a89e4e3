"""Run a function on several real processes (gloo, loopback) and collect what each returns.

The processes are forked from a server that has loaded what the tests' functions import, so starting them takes a fraction of a second.
The function must be importable (module level of a test file).
"""

import multiprocessing
import os
import pickle
import socket
import traceback

CONTEXT = multiprocessing.get_context("forkserver")
# Otherwise each rank imports it again: half a second to a second for pytest, peft or the trainers.
CONTEXT.set_forkserver_preload(
    ["tests.tiny_models", "tests.tiny_adapt", "tests.tiny_training", "peft", "pytest", "tests.frozen"]
)
TIMEOUT = 240


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _child(connection, rank, size, port, target, arguments):
    import torch

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    target(connection, rank, *arguments)


def start_ranks(size, target, *arguments, port=None):
    """``target(connection, rank, *arguments)`` on ``size`` processes, in the environment of a launcher: their pipes, and they."""
    port = port or free_port()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_child, args=(theirs, rank, size, port, target, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    return pipes, processes


def _call(connection, rank, function, arguments):
    from ladder_residual.distributed.world import distributed

    try:
        with distributed("cpu", timeout=60) as world:
            result = function(world, *arguments)
        answer = "ok", result
    except BaseException:
        answer = "error", traceback.format_exc()
    # Whole: what ``send`` makes of a tensor is memory shared with this process, which may have ended when it is opened.
    connection.send_bytes(pickle.dumps(answer))


def run_on_ranks(size, function, *arguments):
    """``[function(world, *arguments) for each rank]``; fails with the first rank's traceback."""
    pipes, processes = start_ranks(size, _call, function, arguments)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(TIMEOUT), f"rank {rank} of {size} gave no answer within {TIMEOUT} s"
            results.append(pickle.loads(pipe.recv_bytes()))
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    # A rank that fails makes the others lose it: show the cause, not the consequence.
    failed = [(f"rank {rank}:\n{value}") for rank, (status, value) in enumerate(results) if status != "ok"]
    failed.sort(key=lambda text: "PeerLost" in text)
    assert not failed, failed[0]
    return [value for _, value in results]
