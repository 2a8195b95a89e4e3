"""Decode, prefill and whole generations on real ranks."""

import json

import pytest

from ladder_residual.bench.demo import demo_directory
from ladder_residual.bench.overlap import run_cases
from tests.forked import run_program
from tests.ranks import run_on_ranks


def test_the_command_measures_real_ranks(demo_dir):
    words = ["bench", "decode", "--model", demo_dir, "--tp", "2", "--batch", "1,3"]
    words += ["--context", "8", "--links", "none,200us", "--wirings", "ladder,desync-2x", "--repeats", "5"]
    done = run_program(*words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "decode" in done.stdout.splitlines()[0]  # the title of the table
    result = json.loads(done.stdout.splitlines()[-1])
    assert {(row["batch"], row["wiring"]) for row in result["rows"]} == {
        (batch, wiring) for batch in (1, 3) for wiring in ("standard", "ladder", "desync-2x", "no-comm")
    }
    assert all(row["median_ms"] > 0 for row in result["rows"])


def prefill_and_e2e(world):
    asked = {"source": str(demo_directory()), "batches": [1, 2], "latencies": [0.0], "wirings": ["ladder"], "repeats": 5}
    prefill = run_cases(world, phase="prefill", prompt=8, **asked)
    return prefill, run_cases(world, phase="e2e", prompt=8, new=4, **asked)


def test_the_other_phases():
    for prefill, e2e in run_on_ranks(2, prefill_and_e2e):
        for result, new in ((prefill, None), (e2e, 4)):
            assert result["benchmark"] == ("e2e" if new else "prefill")
            assert result["all_reduces_per_step"] == 2 * 5 * (new or 1)
            assert {(row["batch"], row["wiring"]) for row in result["rows"]} == {
                (batch, wiring) for batch in (1, 2) for wiring in ("standard", "ladder", "no-comm")
            }
            for row in result["rows"]:
                assert row["tokens_per_s"] == pytest.approx(row["batch"] * (new or 8) * 1e3 / row["median_ms"])
