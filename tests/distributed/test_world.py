"""What ranks decide together: who works first, and whether one of them cannot go on."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from ladder_residual.distributed.world import EmulatedRank, World, distributed
from tests.ranks import run_on_ranks, start_ranks

SHORT = 1.0


def test_an_emulated_rank_cannot_stand_where_ranks_must_exist():
    rank = EmulatedRank(2)
    assert (rank.rank, rank.size, rank.reducer().size) == (0, 2, 1)
    assert not {"group", "store", "barrier", "broadcast", "check_same"} & set(dir(rank))
    with pytest.raises(ValueError, match="a World of 2 ranks needs their process group"):
        World(size=2)


def _main_first(connection, rank, path, fails):
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
    pipes, processes = start_ranks(3, _main_first, tmp_path / "rows", fails)
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
