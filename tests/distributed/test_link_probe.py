"""The link is measured alike by all ranks, and decides between sockets and gloo."""

import pytest
import torch

from ladder_residual.distributed.link_probe import AllReduceTimes, crossover_bytes, probe_link, reducer_for_link
from ladder_residual.distributed.world import World
from tests.ranks import run_on_ranks


def probed(world):
    probe = probe_link(world, sizes=(1 << 10, 1 << 16, 1 << 18), repeats=2)
    chosen = reducer_for_link(world, small_allreduce="measured", comm_dtype="bf16")
    with pytest.raises(ValueError, match="choose fixed or measured"):
        reducer_for_link(world, small_allreduce="guessed")
    with pytest.raises(ValueError, match="choose same or bf16"):
        world.reducer(comm_dtype="int4")
    with pytest.raises(ValueError, match="need the async reducer"):
        world.reducer("blocking", comm_dtype="bf16")
    return probe.to_dict(), chosen.small_allreduce_bytes, chosen.comm_dtype == torch.bfloat16


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_measure_and_choose_alike(size):
    results = run_on_ranks(size, probed)
    assert all(result == results[0] for result in results)
    probe, chosen, is_rounded = results[0]
    assert is_rounded
    assert [row["bytes"] for row in probe["rows"]] == [1 << 10, 1 << 16, 1 << 18]
    assert all(row[way] > 0 for row in probe["rows"] for way in ("sockets", "sockets_bf16", "gloo"))
    assert 0 <= chosen <= 1 << 22


def test_the_link_decides_which_all_reduces_are_small():
    def rows(*times):
        return [AllReduceTimes(bytes=10**k, sockets=a, sockets_bf16=a, gloo=b) for k, (a, b) in enumerate(times, 3)]

    assert crossover_bytes(rows((1, 2), (3, 4), (9, 5))) == 10**4  # one trip wins until the bytes weigh more
    assert crossover_bytes(rows((1, 2), (3, 4))) == 10**4
    assert crossover_bytes(rows((3, 2), (1, 4))) == 0  # a noisy win above a loss is not believed


def test_one_process_has_no_link():
    with pytest.raises(ValueError, match="between two or more CPU ranks"):
        probe_link(World())
    assert reducer_for_link(World(), small_allreduce="measured", comm_dtype="bf16").size == 1
