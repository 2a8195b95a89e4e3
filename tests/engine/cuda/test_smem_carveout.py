from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from ladder_residual.engine.cuda import smem_carveout


def test_a_carveout_is_set_once_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    answers = [1, 0, 0]  # the driver refuses the first time

    class Driver:
        def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
            assert attribute == 9
            calls.append((function.value, value))
            return answers[len(calls) - 1]

    monkeypatch.setattr(smem_carveout, "driver", Driver)
    monkeypatch.setattr(smem_carveout, "_set", {})
    kernel = SimpleNamespace(function=77)
    for percent in (None, 100, 100, 100, None, None):
        smem_carveout.set_carveout(kernel, percent)
    smem_carveout.set_carveout(None, 100)  # the interpreter compiles nothing
    assert calls == [(77, 100), (77, 100), (77, -1)]
