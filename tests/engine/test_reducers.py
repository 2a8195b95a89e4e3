"""What reducers allocate, and how emulated all-reduces are launched."""

from __future__ import annotations

import pytest
import torch

from ladder_residual.engine import reducers
from ladder_residual.engine.cuda.launcher import Launcher
from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.links import parse_link
from tests.engine.tiny import CPU


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


class Local(reducers.SymmetricReducer):
    """Symmetric memory of one process: what is kept and what is asked of it can be seen without a GPU."""

    def __init__(self):
        self.made = []

    def empty(self, rows, hidden, dtype, device):
        self.made.append(rows)
        return torch.empty(rows, hidden, dtype=dtype)

    def rendezvous(self, buffer):
        pass


class LocalPrompts(Local, reducers.SymmetricPromptReducer):
    def __init__(self):
        super().__init__()
        self._kept, self._taken = [], 0


def test_prompts_use_the_same_symmetric_buffers_again():
    reducer = LocalPrompts()
    for rows in (600, 40, 600, 700):
        reducer.next_prompt()
        partial, reduced = reducer.allocate(rows, 512, torch.float32, CPU)
        assert partial.shape == reduced.shape == (rows, 512)
        assert (partial is reduced) == (partial.nbytes > reducers.ONE_SHOT_BYTES)
        second, _ = reducer.allocate(rows, 512, torch.float32, CPU)
        assert second.data_ptr() != partial.data_ptr()
    assert reducer.made == [600, 600, 700, 700]


@pytest.mark.parametrize("rows", [1, 600])
def test_a_partial_that_is_kept_is_no_part_of_the_all_reduce(rows):
    for reducer in (Local(), reducers.NoReducer(), reducers.NcclReducer((None, None))):
        partial, reduced = reducer.allocate(rows, 512, torch.float32, CPU, keep_partial=True)
        assert partial.data_ptr() != reduced.data_ptr()
