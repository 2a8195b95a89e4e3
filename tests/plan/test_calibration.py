"""Measurements become constants, and what was calibrated on is not counted as checked."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.planner.points import document, result_points
from lab.planner.validate import validate
from ladder_residual.links import Link
from ladder_residual.plan.calibration import device_toml, fit_link, link_toml, with_measured_overlap, with_measured_step
from ladder_residual.plan.cost import engine
from ladder_residual.plan.hardware import shipped
from ladder_residual.plan.planner import TWO_STREAM, make_cases


def a_case():
    [(_, case)] = make_cases("llama-3-70b", device="h200", tp=[8], link=["nccl"], batch=[1], prompt=1024, new=512)
    return case


@settings(max_examples=40)
@given(alpha=st.floats(1, 1000), bandwidth=st.floats(0.1, 500), ranks=st.integers(2, 64))
def test_a_link_is_recovered_from_its_own_times(alpha, bandwidth, ranks):
    link = Link(name="x", title="x", alpha_us=alpha, bandwidth_gbs=bandwidth)
    samples = [(size, link.us(size, ranks)) for size in (4096, 65536, 2**20, 2**26)]
    assert fit_link(samples, ranks) == (pytest.approx(alpha, rel=1e-3), pytest.approx(bandwidth, rel=1e-3))


@pytest.mark.parametrize(
    ("samples", "ranks", "says"),
    [
        ([(1024, 5.0)], 2, "two message sizes"),
        ([(1024, 5.0), (4096, 5.0)], 1, "at least 2 ranks"),
        ([(1024, 5.0), (4096, -1.0)], 2, "must be above 0"),
        ([(1024, 9.0), (4096, 5.0)], 2, "larger messages were not slower"),
    ],
)
def test_timings_that_make_no_link_are_refused(samples, ranks, says):
    with pytest.raises(ValueError, match=says):
        fit_link(samples, ranks)


def test_written_toml_is_read_back(tmp_path):
    file = tmp_path / "mine.toml"
    text = link_toml("bench", [(1e4, 31.0), (1e6, 130.0), (1e8, 10_030.0)], 2, 'box "A"')
    file.write_text(text + device_toml("card", memory_gb=24, read_gbs=930, tflops=140, source="measured here"))
    hardware = shipped().extended(file)
    card = hardware.device("card")
    assert (card.bandwidth_gbs, card.bandwidth_share) == (930, 1.0)
    assert hardware.link("bench", card).us(1e6, 2) == pytest.approx(130, rel=0.01)
    assert hardware.link("bench", card).source == 'box "A"'


def test_gaps_and_overlap_explain_the_measured_steps():
    case = a_case()
    phase = case.decode_phase()
    faster = replace(case, engine=with_measured_step(case, phase, 5.0))
    assert faster.timeline("no-comm", phase).us == pytest.approx(5000)
    two = replace(faster, link=replace(case.link, curves={}, alpha_us=0.0, in_situ_us=0.0))
    two = replace(two, engine=with_measured_overlap(two, phase, 4.4), real_ranks=False)
    assert two.timeline(TWO_STREAM, phase).us == pytest.approx(4400, rel=1e-3)
    assert with_measured_step(case, phase, 0.1).module_us == 0  # faster than memory allows: the error stays visible


def test_an_engine_result_calibrates_on_its_quiet_steps_and_is_checked_on_the_rest(tmp_path):
    """Half the gaps of the shipped profile: a better engine, still predicted on all points with all-reduces."""
    better = replace(engine("fused"), module_us=engine("fused").module_us / 2)
    setting = document("emulated")["setting"]
    rows = [
        {"engine": "fused", "batch": 1, "allreduce_us": t, "wiring": w, "ms": 1.0}
        for t in (0, 24)
        for w in ("standard", "ladder")
    ]
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"setting": setting, "points": rows}))
    truth = [replace(p, case=replace(p.case, engine=better)).predicted() for p in result_points([file], "engine", shipped())]
    file.write_text(json.dumps({"setting": setting, "points": [{**r, "ms": ms} for r, ms in zip(rows, truth, strict=True)]}))
    points = result_points([file], "engine", shipped())
    assert [p.role for p in points] == ["fit", "check", "check", "check"]
    assert [p.predicted() for p in points] == pytest.approx(truth)
    assert validate(engine_results=[file]).passed
    without = [{**r, "ms": 2 * ms} for r, ms in zip(rows[2:], truth[2:], strict=True)]
    file.write_text(json.dumps({"setting": setting, "points": without}))
    assert not validate(engine_results=[file]).passed
