"""What ranks decide together: who works first, and whether one of them cannot go on."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from ladder_residual.parallel import distributed
from ranks import _CONTEXT, _free_port, run_on_ranks

SHORT = 1.0


def _rank(connection, rank, port, path, fails):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def work():
        if rank == 0:
            time.sleep(3 * SHORT)  # longer than any collective may take
            if fails:
                raise KeyError("no such text")
            path.write_text("packed")
        return path.read_text()

    try:
        with distributed("cpu", timeout=60) as world:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT), world.group)
            found = world.main_first(work), world.main_first(lambda: "again")
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60), world.group)
            connection.send(found)
    except (ValueError, KeyError) as error:
        connection.send(str(error))


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_wait_for_the_first_however_long_it_takes(tmp_path, fails):
    """Packing billions of tokens outlasts every time-out of a collective."""
    port, pipes, processes = _free_port(), [], []
    for rank in range(3):
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_rank, args=(theirs, rank, port, tmp_path / "rows", fails), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    said = [pipe.recv() if pipe.poll(120) else "nothing" for pipe in pipes]
    for process in processes:
        process.join(10)
        process.kill()
    if fails:
        assert "no such text" in said[0]
        assert all("rank 0 failed" in text for text in said[1:])
    else:
        assert said == [("packed", "again")] * 3


def _problem(world, who):
    return world.first_problem("too little memory" if world.rank == who else None)


@pytest.mark.parametrize(("who", "expected"), [(1, "rank 1: too little memory"), (None, None)])
def test_what_stops_one_rank_stops_all(who, expected):
    assert run_on_ranks(2, _problem, who) == [expected, expected]
