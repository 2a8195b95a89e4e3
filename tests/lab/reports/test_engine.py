"""The page of the engine's results says no more than the rows do."""

from __future__ import annotations

import pytest

from lab.reports.engine import decode_table, render, spread, tokens_table
from lab.reports.sources import read_results
from ladder_residual.bench.checks import warnings_of

RESULTS = read_results("engine")


@pytest.mark.parametrize("stem", RESULTS)
def test_a_result_says_where_it_was_made(stem: str) -> None:
    result = RESULTS[stem]
    assert result["commit"]
    assert result["machine" if result.get("interpreted") or result.get("control") else "gpu"]


def test_an_emulated_table_says_so() -> None:
    """In its heading, or in the row."""
    for part in render(RESULTS).split("\n## ")[1:]:
        if "70B" in part or "70b" in part:
            assert "emulated" in part.splitlines()[0] or all("emulated" in line for line in part.splitlines() if "70B" in line)


@pytest.mark.parametrize("stem", RESULTS)
def test_no_committed_result_is_doubtful(stem: str) -> None:
    """No emulated all-reduce lasted longer than its link, and no step read faster than the read bandwidth."""
    assert warnings_of(RESULTS[stem]) == []


def test_an_all_reduce_that_outlasts_its_link_is_found() -> None:
    step = {"batch": 64, "link": "none", "link_us": 0.0, "wiring": "standard", "ms_per_token": 7.897}
    rows = [step, {**step, "link": "5us", "link_us": 5.0, "ms_per_token": 9.275}, {**step, "link": "18us", "link_us": 18.0}]
    (warning,) = warnings_of({"rows": [*rows, {**rows[1], "wiring": "ladder", "ms_per_token": 99.0}], "layers": 80})
    assert warning == "batch 64, 5us: all-reduces lasted 8.6 us where the link says 5.0"
    prompts = [{**row, "ms": row.pop("ms_per_token")} for row in rows]
    assert warnings_of({"rows": prompts, "layers": 80}) == [warning]


def test_a_read_bandwidth_below_that_of_a_step_is_found() -> None:
    result = {"layers": 80, "read_bandwidth_tb_s": 4.0}
    assert warnings_of({**result, "rows": [{"roofline_share": 0.9}, {"roofline_share": 1.0}]}) == []
    (warning,) = warnings_of({**result, "rows": [{"roofline_share": 0.9}, {"roofline_share": 1.02}]})
    assert "a step itself read 4.080 TB/s" in warning


def step(wiring: str, ms: float, **more: object) -> dict:
    return {"batch": 1, "link": "24us", "wiring": wiring, "ms_per_token": ms, "p10_ms": ms, "p90_ms": 1.02 * ms, **more}


def test_a_row_of_the_decode_table_compares_the_wirings_of_one_run() -> None:
    rows = [step("standard", 8.0), step("ladder", 5.0, over_standard=1.6, of_no_comm_bound=0.9, schedule="serial")]
    again = [step("standard", 9.0), step("ladder", 9.0, over_standard=1.0, of_no_comm_bound=0.1, schedule="serial")]
    shown = decode_table([{"rows": rows}, {"rows": again}])
    assert "| 1 | 24us | 8.00 | 5.00 | **1.60x** |  |  | 0.90x | serial |" in shown
    assert len(shown.splitlines()) == 3  # the first run of a setting counts
    assert spread([{"rows": rows}]) == pytest.approx(2.0)


def test_equal_tokens_are_counted_by_dtype() -> None:
    half = {"wiring": "ladder, float16", "tokens": 8, "equal_tokens": 4}
    whole = {"wiring": "ladder, float32", "tokens": 8, "equal_tokens": 7}
    assert "| the engine | 14 of 16 | 4 of 8 |  |" in tokens_table({"the engine": {"rows": [half, whole, whole]}})
