"""What a rank finds when it starts; run by test_launch.py."""

import json
import logging
import os
import signal
import sys

import torch

if __name__ == "__main__":
    found = {
        "arguments": sys.argv[1:],
        "ranks": os.environ["WORLD_SIZE"],
        "threads": torch.get_num_threads(),
        "read": sys.stdin.read() if os.environ["RANK"] == "0" else None,
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "logging": logging.root.manager.disable,
    }
    os.write(1, (json.dumps([os.environ["RANK"], found]) + "\n").encode())  # in one piece, beside the other rank's
    if "fail" in sys.argv:
        sys.exit(2 if os.environ["RANK"] == "1" else 0)
