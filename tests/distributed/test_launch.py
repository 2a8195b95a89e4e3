"""Ranks of one host: they meet where no other user can look, and start alike, forked from the launcher or executed anew."""

import json
import re
import stat
import subprocess
import sys

import pytest

PROBE = """
import json, os, socket, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from ladder_residual.distributed.launch import launch, run_command
from ladder_residual.distributed.world import distributed

def main():
    if "WORLD_SIZE" not in os.environ:
        sys.exit(launch([], 2, module="probe"))
    with distributed("cpu", timeout=30) as world:
        total = world.reducer("blocking").start(torch.ones(1)).wait().item()
        try:
            dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=1))
            port = "open"
        except Exception:
            port = "closed"
        folder = Path(os.environ["LADDER_STORE"]).parent
        about = {"total": total, "port": port, "mode": folder.stat().st_mode, "owner": folder.stat().st_uid}
        Path(f"{world.rank}.json").write_text(json.dumps(about))
        world.barrier()

if __name__ == "__main__":
    run_command(main)
"""


def test_the_store_of_launched_ranks_is_a_file_of_the_user(tmp_path):
    """A store on a loopback port would show its keys, and the sockets' secrets in them, to every user of the host."""
    (tmp_path / "probe.py").write_text(PROBE)
    done = subprocess.run([sys.executable, "-m", "probe"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        about = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (about["total"], about["port"]) == (2.0, "closed")
        assert stat.S_IMODE(about["mode"]) == 0o700
        assert about["owner"] == tmp_path.stat().st_uid


START = """
import sys
from ladder_residual.distributed import launch

if sys.argv[1] == "execute":
    launch.can_fork = lambda: False
sys.exit(launch.launch(sys.argv[2:], 2, "tests.distributed.hello"))
"""


def start(how, *arguments):
    words = [sys.executable, "-c", START, how, *arguments]
    done = subprocess.run(words, input="a line\n", capture_output=True, text=True, timeout=120)
    return done.returncode, dict(map(json.loads, done.stdout.splitlines())), done.stderr


@pytest.mark.parametrize("arguments", [["one", "two"], ["fail"]])
def test_a_forked_rank_finds_what_an_executed_one_finds(arguments):
    forked, executed = start("fork", *arguments), start("execute", *arguments)
    assert [forked[:2], sorted(forked[1])] == [executed[:2], ["0", "1"]]
    assert forked[1]["0"]["read"] == "a line\n"
    assert forked[0] == (1 if "fail" in arguments else 0)
    if "fail" in arguments:  # the rank left no message: the launcher names it
        assert all("rank 1 of 2" in said and "failed with exit code 2" in said for said in (forked[2], executed[2]))


@pytest.mark.parametrize("how", ["fork", "execute"])
def test_the_killed_rank_is_named_although_another_spoke_first(how):
    code, _, said = start(how, "lose")
    bar, cause, consequence = said.splitlines()
    assert (code, bar) == (1, "50 %|#####     | ")
    assert re.match(r"error: rank 1 of 2 \(pid \d+\) on .* was killed by SIGKILL", cause)
    assert consequence == "error: rank 0 lost its connection to rank 1 at 127.0.0.1: Connection reset by peer"
