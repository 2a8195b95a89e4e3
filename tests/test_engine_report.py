"""The page made from the engine's results: what it says, and that it says no more than they do."""

from __future__ import annotations

import json
from pathlib import Path

from ladder_residual.bench.gpu_report import main, reading_too_low, render, spread, sums_that_outlast_their_link

ROOT = Path(__file__).parent.parent


def test_the_page_is_what_the_results_say() -> None:
    """docs/benchmarks.md is generated: a new result without a new page fails here."""
    files = sorted((ROOT / "results" / "engine").glob("*.json"))
    results = [json.loads(file.read_text()) for file in files]
    assert render(results) == (ROOT / "docs" / "benchmarks.md").read_text()
    for result in results:
        assert result["commit"]
        assert result["machine" if result.get("interpreted") or result.get("control") else "gpu"]
        assert ("(emulated)" in render([result])) == (result["tp"] > 1)


def test_standard_waits_for_no_emulated_sum_longer_than_its_link() -> None:
    checked = 0
    for file in sorted((ROOT / "results" / "engine").glob("*.json")):
        result = json.loads(file.read_text())
        if result["benchmark"] == "decode" or (result["benchmark"] == "prefill" and "link_us" in result["rows"][0]):
            assert sums_that_outlast_their_link(result["rows"], result["layers"]) == [], file.name
            checked += len(result["rows"])
    assert checked > 100
    step = {"batch": 64, "link": "none", "link_us": 0.0, "wiring": "standard", "ms_per_token": 7.897}
    rows = [step, {**step, "link": "5us", "link_us": 5.0, "ms_per_token": 9.275}, {**step, "link": "18us", "link_us": 18.0}]
    (note,) = sums_that_outlast_their_link([*rows, {**rows[1], "wiring": "ladder", "ms_per_token": 99.0}], 80)
    assert note.startswith("batch 64, 5us: sums lasted 8.6 us where the link says 5.0")
    prompts = [{**row, "ms": row.pop("ms_per_token")} for row in rows]
    assert sums_that_outlast_their_link(prompts, 80) == [note]


def test_a_roofline_below_a_step_is_said() -> None:
    assert reading_too_low([{"roofline_share": 0.9}, {"roofline_share": 1.0}], 4e12) == []
    (note,) = reading_too_low([{"roofline_share": 0.9}, {"roofline_share": 1.02}], 4e12)
    assert "a step itself read 4.080 TB/s" in note
    for file in sorted((ROOT / "results" / "engine").glob("*.json")):
        result = json.loads(file.read_text())
        if result["benchmark"] == "decode":
            notes = " ".join(result["notes"])
            assert all(said in notes for said in reading_too_low(result["rows"], 1e12 * result["read_bandwidth_tb_s"])), file


def test_a_missed_target_is_shown() -> None:
    row = {"batch": 1, "link": "5us", "wiring": "ladder", "over_standard": 1.1, "roofline_share": 0.9, "startup_s": 21.0}
    quiet = {**row, "link": "none", "wiring": "standard", "startup_s": 1.0}
    run = {"benchmark": "decode", "emulated": True, "model": "llama-3-70b", "tp": 8, "layers": 80, "read_bandwidth_tb_s": 4.0}
    page = render(
        [{**run, "rows": [row, quiet]}, {**run, "rows": [{**row, "startup_s": 2.0}, quiet], "read_bandwidth_tb_s": 5.0}]
    )
    assert "| ladder over standard at 5us | >= 1.25 | 1.100, 1.100 | missed |" in page
    assert "| ladder at 5 us: roofline share | >= 0.80 | 0.900, 0.900 | reached |" in page
    # a run that read its bandwidth low is measured with the other's too, standard as well as ladder
    assert page.count("| the same against 5.0 TB/s | >= 0.80 | 0.720, 0.900 | reached in 1 of 2 runs |") == 2
    assert "| slowest start of an engine, s | <= 20 | 21.000, 2.000 | missed |" in page
    remarked = render([{**run, "rows": [row, quiet], "remark": "cards differ"}])
    assert "\ncards differ\n" in remarked.partition("## llama")[0]
    part = render([{**run, "layers": 8, "rows": [row]}])
    assert "| ladder over standard at 5us | >= 1.25 | - | - |" in part  # a part of the model is no evidence for the whole


def test_a_whole_8b_counts_with_its_peers_and_alone() -> None:
    run = {"emulated": False, "model": "llama-3.1-8b", "tp": 1, "layers": 32, "read_bandwidth_tb_s": 4.0}
    rows = [
        {"batch": 1, "link": "none", "wiring": wiring, "roofline_share": 0.9, "startup_s": 1.0}
        for wiring in ("standard", "ladder")
    ]
    peers = [
        {"engine": "ladder-residual, standard", "roofline_share": 0.8, "ms_per_token": 4.0},
        {"engine": "compiled", "roofline_share": 0.4, "ms_per_token": 8.0},
    ]
    page = render([{**run, "benchmark": "decode", "rows": rows}, {**run, "benchmark": "peers", "rows": peers}])
    assert "| 8B on the whole card, standard: roofline share | >= 0.85 | 0.900, 0.800 | reached in 1 of 2 runs |" in page
    assert "| 8B, time of a token: compiled over ours | >= 1.00 | 2.000 | reached |" in page


def test_equal_tokens_of_a_dtype_and_of_float32_are_told_apart() -> None:
    run = {"benchmark": "generate", "emulated": False, "model": "smollm2", "tp": 1, "machine": "some CPU", "torch": "2"}
    half = {"wiring": "ladder, float16", "tokens": 8, "equal_tokens": 4}
    whole = {"wiring": "ladder, float32", "tokens": 8, "equal_tokens": 8}
    results = [{**run, "rows": [half, {**whole, "equal_tokens": 7}]}, {**run, "interpreted": True, "rows": [whole]}]
    page = render(results)
    assert (
        "| greedy tokens of SmolLM2 equal to transformers' | 1 | 0.500 | missed: below, with what float32 would choose |"
        in page
    )
    assert "| greedy tokens of SmolLM2 equal to transformers', float32 | 1 | 0.875 | missed" in page
    assert (
        "| greedy tokens of SmolLM2 equal to transformers', the kernels interpreted on a CPU, float32 | 1 | 1.000 | reached |"
        in page
    )
    assert "some CPU, torch 2, None, commit None." in page
    itself = {**run, "control": "eager against sdpa", "rows": [{**half, "equal_tokens": 6}, whole]}
    page = render([*results, itself])
    assert page.count("what float32 would choose; transformers' eager attention and its sdpa agree in 0.750 |") == 1
    assert (
        "transformers', float32 | 1 | 0.875 | missed: below, with what float32 would choose |" in page
    )  # rounding is no excuse
    assert "transformers' | 1 | 0.500 |" in page  # the control is no result of the engine
    assert "\neager against sdpa.\n" in page


def test_spread() -> None:
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == {"p10_ms": 1.0, "p90_ms": 5.0, "runs": 5}


def test_report_refuses_an_empty_folder(tmp_path: Path) -> None:
    assert main([str(tmp_path), str(tmp_path / "out.md")]) == 2
    assert main([]) == 2
