"""Which reducer a rank gets, and how emulated all-reduces are launched."""

from __future__ import annotations

import warnings
from unittest.mock import patch

import pytest
import torch

from ladder_residual.engine import reducers
from ladder_residual.engine.cuda.launcher import Launcher
from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.links import parse_link
from tests.engine.tiny import CPU
from tests.ranks import run_on_ranks


@pytest.mark.parametrize(
    ("text", "hopper", "pdl"), [("24us", True, True), ("24us,no-pdl", True, False), ("24us", False, False)]
)
def test_without_pdl_an_all_reduce_and_what_follows_are_ordinary_launches(monkeypatch, text, hopper, pdl):
    launched = []
    monkeypatch.setattr(reducers, "is_hopper", lambda device: hopper)

    class Noting(Launcher):
        def __call__(self, kernel, grid, *args, num_warps, **constants):
            launched.append((self.pdl, self.dependent, self.smem_carveout))
            self.dependent = True

    monkeypatch.setattr(reducers, "Launcher", Noting)
    launch = Noting(dependent=True, smem_carveout=100)
    partial = torch.zeros(1, 8192)
    reducers.EmulatedReducer(parse_link(text), 8, CPU).reduce(partial, partial.clone(), 0, launch)
    assert launched == [(PdlMode.TRIGGER_THEN_WAIT, True, 100) if pdl else (PdlMode.OFF, False, 100)]
    assert launch.dependent == pdl


def make_symmetric(world, dtype):
    """The reducer a rank ends up with, and the warnings it gave."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        groups = (world.group, world.group)
        made = reducers.make_reducer("symm", tp=2, link=None, groups=groups, dtype=dtype, device=world.device)
    return made.name, [str(warning.message) for warning in given]


# dtype, the rank without symmetric memory, the reducer of both ranks, the warning of each
CASES = [
    (torch.bfloat16, None, "symm", ("", "")),
    (torch.bfloat16, 1, "nccl", ("another rank has none", "too few handles")),
    (torch.float16, None, "nccl", ("not torch.float16", "not torch.float16")),
]


def make_every_case(world):
    def broken_on(rank):
        def empty(_, rows, hidden, dtype, device):
            if world.rank == rank:
                raise RuntimeError("too few handles\nand more")
            return torch.empty(rows, hidden, dtype=dtype)

        return patch.multiple(reducers.SymmetricReducer, empty=empty, rendezvous=lambda *_: None, reduce=lambda *_: None)

    made = [make_symmetric(world, torch.bfloat16)]  # the real attempt, on a machine that has none
    with patch.object(torch.cuda, "synchronize", lambda *_: None):
        for dtype, broken, *_ in CASES:
            with broken_on(broken):
                made.append(make_symmetric(world, dtype))
    return made


def test_symmetric_memory_is_used_by_all_ranks_or_none():
    expected = [("nccl", ("no symmetric memory here", "no symmetric memory here")), *(case[2:] for case in CASES)]
    for rank, found in enumerate(run_on_ranks(2, make_every_case)):
        for (made, given), (name, reasons) in zip(found, expected, strict=True):
            assert made == name
            assert [reasons[rank] in text for text in given] == ([True] if reasons[rank] else [])


@pytest.mark.parametrize(
    ("kind", "tp", "message"),
    [
        ("none", 2, "reducer 'none' on tp=2 would drop the other ranks"), ("emulated", 2, "reducer 'emulated' needs a link"),
        ("symm", 2, "reducer 'symm' needs groups"), ("mpi", 2, "unknown reducer 'mpi'; choose from none, emulated, nccl, symm"),
    ],
)  # fmt: skip
def test_refusals(kind, tp, message):
    with pytest.raises(ValueError, match=message):
        reducers.make_reducer(kind, tp=tp, link=None, groups=None, dtype=torch.bfloat16, device=CPU)
