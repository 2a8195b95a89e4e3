"""Starts two ranks of hello.py, forked or executed; run by test_launch.py."""

import sys

from ladder_residual.distributed import launch

if __name__ == "__main__":
    if sys.argv[1] == "execute":
        launch.can_fork = lambda: False
    sys.exit(launch.launch(sys.argv[2:], 2, "tests.distributed.hello"))
