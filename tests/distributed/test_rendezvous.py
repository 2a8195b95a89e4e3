"""Ranks of one host meet where no other user can look."""

import json
import stat
import subprocess
import sys

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
