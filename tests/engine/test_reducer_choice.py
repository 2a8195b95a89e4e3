"""Which reducer a rank gets."""

from __future__ import annotations

import warnings
from unittest.mock import patch

import pytest
import torch

from ladder_residual.engine import reducer_choice, reducers
from tests.engine.tiny import CPU
from tests.ranks import run_on_ranks


def make_symmetric(world, dtype):
    """The reducer a rank ends up with, and the warnings it gave."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        groups = (world.group, world.group)
        made = reducer_choice.make_reducer("symm", tp=2, link=None, groups=groups, dtype=dtype, device=world.device)
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
        ("symm", 2, "reducer 'symm' needs groups"), ("mpi", 2, "unknown reducer 'mpi'; choose from none, emulated, auto, nccl, symm"),
    ],
)  # fmt: skip
def test_refusals(kind, tp, message):
    with pytest.raises(ValueError, match=message):
        reducer_choice.make_reducer(kind, tp=tp, link=None, groups=None, dtype=torch.bfloat16, device=CPU)


def choose_automatically(world, microseconds):
    """What ranks choose that measure the times ``microseconds``: (rows, reducer) -> us."""

    def timed(reducer, group, rows, *_):
        return microseconds[(rows, reducer.name)]

    nothing = {"empty": lambda _, rows, hidden, dtype, device: torch.empty(rows, hidden, dtype=dtype)}
    nothing |= {"rendezvous": lambda *_: None, "reduce": lambda *_: None}
    with (
        patch.multiple(reducers.SymmetricReducer, **nothing),
        patch.multiple(reducer_choice, time_all_reduce=timed, has_nccl=lambda group: True),
        patch.object(torch.cuda, "synchronize", lambda *_: None),
    ):
        groups = (world.group, world.group)
        size = {"batch": 3, "hidden": 1024, "dtype": torch.bfloat16, "device": CPU}
        decode, prompts, times = reducer_choice.choose_reducers("auto", tp=2, link=None, groups=groups, **size)
    return decode.name, type(prompts).__name__, times


@pytest.mark.parametrize("decode", ["symm", "nccl"])
@pytest.mark.parametrize("prompts", ["symm", "nccl"])
def test_auto_takes_the_faster_for_each_message(decode, prompts):
    rows = {3: decode, reducer_choice.PROMPT_ROWS: prompts}
    times = {(count, name): 4.0 if name == fast else 50.0 for count, fast in rows.items() for name in ("symm", "nccl")}
    kept = {"symm": "SymmetricPromptReducer", "nccl": "NcclReducer"}[prompts]
    for found in run_on_ranks(2, choose_automatically, times):
        assert found == (decode, kept, {name: times[3, name] for name in ("symm", "nccl")})


def test_auto_without_any_all_reduce_says_so():
    for message in run_on_ranks(2, choose_where_there_is_nothing):
        assert "neither NCCL nor symmetric memory" in message


def choose_where_there_is_nothing(world):
    groups = (world.group, world.group)
    size = {"batch": 1, "hidden": 64, "dtype": torch.bfloat16, "device": CPU}
    with pytest.raises(ValueError, match="--engine torch") as error:
        reducer_choice.choose_reducers("auto", tp=2, link=None, groups=groups, **size)
    return str(error.value)
