"""What the engine's benchmarks do that needs no GPU."""

from __future__ import annotations

import pytest

from ladder_residual.bench import engine as gpu
from ladder_residual.bench.engine import bench_decode, bench_e2e, bench_prefill, time_in_turns


class Counting:
    """An engine whose steps note who ran at which context."""

    def __init__(self, name: str, log: list[tuple[str, int]]) -> None:
        self.name, self.log, self.length = name, log, 0

    def reset(self, length: int, *, random_context: bool = False) -> None:
        self.length = length

    def replay(self) -> None:
        self.log.append((self.name, self.length))
        self.length += 1


def test_what_is_compared_is_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int]] = []
    first, second = Counting("first", log), Counting("second", log)

    def timed(step, repeats: int) -> list[float]:
        del log[-3:]  # what only warms up
        for _ in range(repeats):
            step()
        return [float(context) for _, context in log[len(log) - repeats :]]

    monkeypatch.setattr(gpu, "time_on_device", timed)
    taken = time_in_turns([first, second, first], context=100, repeats=7, turns=3)
    contexts = [97.0, 98.0, 99.0, 100.0, 101.0, 102.0, 103.0]
    assert taken == {id(first): contexts, id(second): contexts}
    assert [name for name, _ in log] == [*["first"] * 2, *["second"] * 2] * 2 + [*["first"] * 3, *["second"] * 3]


@pytest.mark.parametrize(
    ("run", "changes", "message"),
    [
        (bench_decode, {"links": ("none", "bogus")}, "unknown link 'bogus'"),
        (bench_decode, {"batches": (1, 512)}, "batch 512 is outside"),
        (bench_decode, {"gemm_backend": "mkl"}, "mkl"),
        (bench_prefill, {"wirings": ("standard", "ladder:99")}, "layer 99"),
        (bench_e2e, {"links": ("24us", "24 parsecs")}, "unknown link"),
    ],
)
def test_a_mistake_in_the_last_case_costs_no_measurement(run, changes: dict, message: str) -> None:
    """Refused before weights are made, which would fail here for another reason: there is no GPU."""
    with pytest.raises(ValueError, match=message):
        run(model="llama-3-70b", tp=8, layers=80, **changes)
