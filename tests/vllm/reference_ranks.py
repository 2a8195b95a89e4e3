"""The package's own greedy tokens on two ranks, for wirings whose function depends on the number of ranks.

`torchrun --nproc-per-node 2 reference_ranks.py JOBS.json RESULTS.json`
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tiny
from engines import TIMEOUT_SECONDS, end_group, environment

from ladder_residual.distributed.world import distributed
from ladder_residual.models.loading import load_model


def greedy_on_two_ranks(folder: Path, models: dict[str, Path], prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    given, found = folder / "reference.json", folder / "reference.results.json"
    given.write_text(json.dumps([{name: str(path) for name, path in models.items()}, prompts]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command = [*launcher, "--rdzv-endpoint", "127.0.0.1:0", __file__, str(given), str(found)]
    settings = environment(folder, 2) | {"PYTHONPATH": str(Path(__file__).parent), "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(command, env=settings, start_new_session=True)
    try:
        assert process.wait(TIMEOUT_SECONDS) == 0
    finally:
        end_group(process)
    return json.loads(found.read_text())


def main() -> None:
    models, prompts = json.loads(Path(sys.argv[1]).read_text())
    with distributed("cpu") as world:
        found = {name: tiny.greedy(load_model(path, world), prompts) for name, path in models.items()}
        if world.is_main:
            Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
