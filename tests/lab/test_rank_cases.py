"""What the GPU tests of real ranks share out and agree on, without a GPU."""

import torch
import torch.distributed as dist

from ladder_residual.engine.schedule import SCHEDULES
from tests.gpu.rank_cases import BATCHES, REDUCERS, WIRINGS, Deadline, all_cases, share
from tests.ranks import run_on_ranks


def test_every_wiring_batch_reducer_and_schedule_is_a_case():
    cases = all_cases(4)
    assert len(cases) == len(set(cases))
    for wiring in WIRINGS:
        for batch in BATCHES:
            for reducer in REDUCERS:
                schedules = [case.schedule for case in cases if case[:3] == (wiring, batch, reducer)]
                assert "serial" in schedules
                assert wiring != "ladder" or set(schedules) == set(SCHEDULES)


def test_the_ranks_prepare_all_of_it_once():
    cases = all_cases(4)
    for size in (1, 2, 3, 8):
        shares = [share(cases, rank, size) for rank in range(size)]
        assert sorted(case for part in shares for case in part) == sorted(cases)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def _stops(world):
    """Rank 1's time is over at once, rank 0's is not; then without a limit."""
    group, device = dist.group.WORLD, torch.device("cpu")
    late = Deadline(0.0 if world.rank else 1000.0, group, device).passed()
    early = Deadline(1000.0, group, device).passed()
    return late, early, Deadline(None, group, device).passed()


def test_all_ranks_stop_with_the_one_whose_time_is_over_first():
    assert run_on_ranks(2, _stops) == [(True, False, False)] * 2
