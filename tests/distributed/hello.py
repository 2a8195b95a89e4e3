"""What a rank finds when it starts; run by test_launch.py."""

import json
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from ladder_residual.distributed.launch import OUT_OF_MEMORY, STORE, run_command
from ladder_residual.distributed.sockets import PeerLost


def wait_for_rank_0():
    """A rank that fails at once would have the other one ended before it has spoken."""
    spoken = Path(f"{os.environ[STORE]}.spoken")
    if os.environ["RANK"] == "0":
        spoken.touch()
    while not spoken.exists():
        time.sleep(0.02)


def lose_rank_1():
    """Rank 0 notices first that rank 1 is going to be killed."""
    if os.environ["RANK"] == "0":
        print("50 %|#####     | ", end="", file=sys.stderr, flush=True)
        raise PeerLost("rank 0 lost its connection to rank 1 at 127.0.0.1: Connection reset by peer")
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def starve_rank_1():
    """As deep calls do not fit any more, nor anything else."""
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
        nested(600)
    time.sleep(60)


def nested(calls):
    one = two = three = four = five = six = seven = eight = calls
    if calls:
        return nested(calls - 1), one, two, three, four, five, six, seven, eight
    return bytearray(1 << 30)


def trip_rank_1():
    if os.environ["RANK"] == "1":
        raise KeyError("a bug")
    time.sleep(60)


if __name__ == "__main__":
    found = {
        "arguments": sys.argv[1:],
        "ranks": os.environ["WORLD_SIZE"],
        "threads": torch.get_num_threads(),
        "read": sys.stdin.read() if os.environ["RANK"] == "0" else None,
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "logging": logging.root.manager.disable,
        "interfaces": {os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]} == {"lo"},
    }
    os.write(1, (json.dumps([os.environ["RANK"], found]) + "\n").encode())  # in one piece, beside the other rank's
    if "fail" in sys.argv:
        wait_for_rank_0()
        sys.exit(2 if os.environ["RANK"] == "1" else 0)
    if "lose" in sys.argv:
        run_command(lose_rank_1)
    if "starve" in sys.argv:
        run_command(starve_rank_1)
    if "mute" in sys.argv and os.environ["RANK"] == "1":
        sys.exit(OUT_OF_MEMORY)
    if "bug" in sys.argv:
        run_command(trip_rank_1)
