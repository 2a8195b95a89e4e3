"""The validation itself: that it passes, that it can fail, and that fit and check are kept apart."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.planner import validate as module
from lab.planner.__main__ import app
from lab.planner.allreduce_table import compact
from lab.planner.fit import CONSTANTS, fit, points_with
from lab.planner.points import document, emulated_points, paper_points, repository_results, result_points
from lab.planner.validate import TARGETS, Comparison, validate
from ladder_residual.links.table import read_tables
from ladder_residual.plan.calibration import with_measured_step
from ladder_residual.plan.cost import engine
from ladder_residual.plan.hardware import shipped
from ladder_residual.plan.planner import TWO_STREAM

ROOT = Path(__file__).parents[3]
OVERLAP = {
    "benchmark": "overlap",
    "layers": 8,
    "hidden_size": 1024,
    "tp": 2,
    "batch": 1,
    "latency_us": 500.0,
    "compute_ms": 16.0,
    "communication_ms": 8.0,
    "rows": [
        {"wiring": "standard", "median_ms": 24.0},
        {"wiring": "ladder", "median_ms": 16.5},
        {"wiring": "no-comm", "median_ms": 16.0},
    ],
}


def test_the_model_passes_its_bounds_and_meets_the_targets_it_was_built_for():
    result = validate()
    assert result.passed
    assert len(result.checked()) > 90
    inside = {row["target"]: (row["inside"], row["checked"]) for row in result.summary()}
    assert inside["standard, tokens/s"] == (6, 6)
    assert [c.point.group for c in result.comparisons if c.status == "miss"] == [
        "sizes codellama-34b",
        "sizes bloom-176b",
        "sizes bloom-176b",
        "405B",
    ]


def test_every_speed_number_of_the_paper_is_compared():
    rows = document("paper")["points"]
    keys = {(r["group"], r["model"], r["tp"], r["batch"], r["link"], r["wiring"], r["quantity"]) for r in rows}
    assert len(keys) == len(rows) == 78
    assert len([p for p in paper_points() if p.quantity != "speedup" or not p.group.startswith("70B")]) == 78


def test_fit_points_are_never_counted_as_checked():
    result = validate()
    assert {c.status for c in result.comparisons if c.point.role == "fit"} == {"fit"}
    assert not any(c.point.role == "fit" for c in result.checked())
    assert sum(row["checked"] for row in result.summary()) == len(result.checked())


def test_more_is_checked_than_fitted():
    for points in (paper_points(), emulated_points()):
        assert sum(p.role == "check" for p in points) > 2 * sum(p.role == "fit" for p in points)
    assert len(CONSTANTS) <= sum(p.role == "fit" for p in [*paper_points(), *emulated_points()])


def test_a_wrong_model_fails():
    """Twice the latency of every NCCL call must be noticed."""
    values = {c.key: c.shipped for c in CONSTANTS if c.data == "paper"}
    values["nccl.in_situ_us"] += 25
    comparisons = [Comparison(p, p.predicted(), module._target(p)) for p in points_with(values, "paper")]
    assert any(c.status == "FAIL" for c in comparisons)


def test_a_known_miss_must_keep_its_own_bound(monkeypatch):
    strict = tuple(replace(miss, bound=TARGETS["ladder over standard, NVLink"]) for miss in module.KNOWN_MISSES)
    monkeypatch.setattr(module, "KNOWN_MISSES", strict)
    assert not validate().passed


def test_emulated_rank_is_matched_on_points_it_was_not_fitted_on():
    errors = [abs(p.predicted() / p.measured - 1) for p in emulated_points() if p.role == "check"]
    assert len(errors) == 19
    assert max(errors) < 0.03


@pytest.mark.parametrize("data", ["emulated", "paper"])
def test_shipped_constants_are_what_the_fit_gives(data):
    for name, value in fit(data).items():
        shipped_value = next(c.shipped for c in CONSTANTS if c.key == name)
        assert value == pytest.approx(shipped_value, rel=0.01), name


def test_absent_results_are_said_to_be_absent():
    assert len(validate().absent) == 2


def test_overlap_results_test_the_schedule(tmp_path):
    file = tmp_path / "overlap.json"
    file.write_text(json.dumps(OVERLAP))
    result = validate(overlap_results=[file])
    ours = {c.point.wiring: c.predicted for c in result.comparisons if c.point.source == "overlap"}
    assert ours == {"standard": pytest.approx(24.0), "ladder": pytest.approx(16.5)}
    assert len(result.absent) == 1
    assert result.passed


def test_results_that_disagree_fail(tmp_path):
    file = tmp_path / "overlap.json"
    file.write_text(json.dumps({**OVERLAP, "rows": [{"wiring": "ladder", "median_ms": 24.0}]}))
    assert not validate(overlap_results=[file]).passed


def test_engine_results_are_read_and_named_models_resolved(tmp_path):
    file = tmp_path / "engine.json"
    data = document("emulated")
    file.write_text(json.dumps({"setting": data["setting"], "points": data["points"][:2]}))
    points = result_points([file], "engine", shipped())
    assert [p.role for p in points] == ["fit", "check"]  # the file says so; without a role a point is checked
    assert points[0].predicted() == pytest.approx(7.92, rel=0.01)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a readable JSON"),
        ("{}", "missing or wrong: 'points'"),
        ('{"points": [{"device": "h200"}]}', "missing or wrong"),
        ("[1]", "missing or wrong"),
        ('{"benchmark": "overlap"}', "missing or wrong: 'rows'"),
    ],
)
def test_malformed_results_are_refused(tmp_path, text, says):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        validate(engine_results=[file])


def decode_document(**change):
    """As `ladder bench decode` writes it, made with an engine of known gaps."""
    rows = [
        ("none", 0.0, "standard", "serial"),
        ("none", 0.0, "ladder", "two_stream"),
        ("24us", 24.0, "standard", "serial"),
        ("24us", 24.0, "ladder", "serial"),
    ]
    made = [
        {"batch": 1, "link": name, "link_us": us, "wiring": wiring, "schedule": schedule, "ms_per_token": 1.0}
        for name, us, wiring, schedule in rows
    ]
    about = {"benchmark": "decode", "emulated": True, "model": "llama-3-70b", "tp": 8, "layers": 80, "context": 1280}
    return {**about, "read_bandwidth_tb_s": 4.4, "gpu": "NVIDIA H200", "rows": made, **change}


def test_decode_results_calibrate_the_engine_on_quiet_steps_and_are_checked_on_the_rest(tmp_path):
    file = tmp_path / "decode.json"
    document = decode_document()
    file.write_text(json.dumps(document))
    truth = replace(engine("fused"), module_us=9.0, stream_overlap=0.5)
    points = result_points([file], "engine", shipped())
    assert [p.wiring for p in points] == ["standard", TWO_STREAM, "standard", "ladder"]
    assert points[0].case.device.bandwidth_gbs == pytest.approx(4400)  # as fast as the card was that day
    for row, point in zip(document["rows"], points, strict=True):
        row["ms_per_token"] = replace(point, case=replace(point.case, engine=truth)).predicted()
    file.write_text(json.dumps(document))
    points = result_points([file], "engine", shipped())
    assert [p.role for p in points] == ["fit", "fit", "check", "check"]
    assert [p.predicted() for p in points] == pytest.approx([p.measured for p in points], rel=1e-3)
    assert points[3].case.engine.stream_overlap == pytest.approx(0.5, rel=1e-2)  # the overlap is calibrated without the link
    document["rows"][3]["ms_per_token"] *= 1.2
    file.write_text(json.dumps(document))
    assert not validate(engine_results=[file]).passed


def test_schedules_and_launches_that_the_planner_has_not(tmp_path):
    """Of an interleaved step the best of the other schedules is compared; all-reduces that are not launched early are left out."""
    document = decode_document()
    tried = {"serial": 4.8, "two_stream": 4.6, "interleaved": 4.5}
    document["rows"][1] |= {"schedule": "interleaved", "ms_per_token": 4.5, "schedules_tried_ms": tried}
    document["rows"][2]["pdl"] = False
    document["rows"][3] |= {"schedule": "interleaved", "schedules_tried_ms": {}}
    file = tmp_path / "decode.json"
    file.write_text(json.dumps(document))
    points = result_points([file], "engine", shipped())
    assert [(p.wiring, p.measured) for p in points] == [("standard", 1.0), (TWO_STREAM, 4.6)]


def test_a_card_the_planner_does_not_know_is_refused(tmp_path):
    file = tmp_path / "decode.json"
    file.write_text(json.dumps(decode_document(gpu="Radeon")))
    with pytest.raises(ValueError, match="no device of the planner is called like 'Radeon'"):
        validate(engine_results=[file])


def test_the_results_of_this_repository_are_within_their_bounds():
    engine_files, overlap_files = repository_results(ROOT)
    result = validate(engine_files, overlap_files)
    assert not result.absent
    assert {c.point.source for c in result.checked()} == {"paper", "emulated", "engine", "overlap"}
    assert result.passed, [c.to_dict() for c in result.comparisons if c.status == "FAIL"]


def test_the_shipped_engine_is_the_one_that_was_measured():
    points = [
        p for p in result_points(repository_results(ROOT)[0], "engine", shipped()) if p.group == "llama-3-70b, fused on h200"
    ]
    quiet: dict = {}
    for p in points:
        if p.case.link.alpha_us == 0 and p.role == "fit":
            quiet.setdefault(
                (p.batch, p.wiring), p
            )  # of several files the first: the tables, not the comparison of GEMM backends
    for field, batch in (("module_us", 1), ("module_us_batched", 16)):
        point = quiet[batch, "standard"]
        case = replace(point.case, device=shipped().device("h200"))
        profile = with_measured_step(case, case.decode_phase()._replace(context=point.context), point.measured)
        assert getattr(engine("fused"), field) == pytest.approx(getattr(profile, field), rel=0.02)


def test_files_that_are_no_comparison_are_left_out(tmp_path):
    for kind, name, content in (
        ("engine", "e2e", {"benchmark": "e2e"}),
        ("engine", "real", {"benchmark": "decode", "emulated": False}),
        ("engine", "emulated", decode_document()),
        ("overlap", "list", [1]),
        ("overlap", "run", OVERLAP),
    ):
        folder = tmp_path / "results" / kind
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "results" / "engine" / "broken.json").write_text("{")
    engine_files, overlap_files = repository_results(tmp_path)
    assert [file.stem for file in engine_files + overlap_files] == ["emulated", "run"]


def test_compact_takes_the_median_over_versions_and_irons_out_outliers():
    def row(version, size, us):
        name = f"h9_sxm_nccl_{version}_nccl"
        return {"file": name, "kernel_source": "NCCL", "num_gpus": "8", "bytes": str(size), "us": str(us)}

    rows = [row("1", 1024, 5), row("2", 1024, 99), row("3", 1024, 6), row("1", 2048, 50), row("1", 4096, 7)]
    text = compact(rows)
    assert read_tables(text)["h9_sxm", "nccl"][8] == ((1024, 6.0), (2048, 7.0), (4096, 7.0))


def ok(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def test_validate_prints_both_kinds_of_points_and_the_verdict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no results folder here
    text = ok("validate")
    assert "Checked points" in text
    assert "they validate nothing" in text
    assert "outside its target: sizes bloom-176b" in text
    assert "nothing is said about them" in text
    assert "PASSED" in text


def test_validate_json_and_exit_code_when_a_result_is_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json.loads(ok("validate", "--json"))["passed"] is True
    folder = tmp_path / "results" / "overlap"
    folder.mkdir(parents=True)
    row = {"wiring": "ladder", "median_ms": 99.0}
    bad = {"benchmark": "overlap", "layers": 2, "hidden_size": 8, "tp": 2, "batch": 1, "latency_us": 0}
    (folder / "x.json").write_text(json.dumps({**bad, "compute_ms": 1.0, "communication_ms": 1.0, "rows": [row]}))
    result = CliRunner().invoke(app, ["validate", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["passed"] is False


def test_constants_are_listed_with_what_they_were_fitted_on():
    text = ok("constants")
    assert "nccl.in_situ_us" in text
    assert "chosen by hand" in text
