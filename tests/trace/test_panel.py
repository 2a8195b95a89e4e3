"""Timelines: the trace holds what the simulator said, the picture shows it."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from ladder_residual.cli.trace import app as trace_app
from ladder_residual.plan.planner import TWO_STREAM, make_cases
from ladder_residual.plan.schedule import COMM
from ladder_residual.trace.panel import WAITING, Span, chrome_trace, planned_panel, waiting_spans, write_trace
from ladder_residual.trace.timeline_svg import NARROW, WIDTH, timeline_svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def case():
    asked = {"device": "h100", "tp": [8], "link": ["nccl-no-p2p"], "batch": [1], "prompt": 1024, "new": 512}
    [(_, made)] = make_cases("llama-3-70b", **asked)
    return made


def test_waiting_is_communication_without_compute():
    spans = [Span("compute", "MLP", 0, 0, 10), Span(COMM, "all-reduce", 0, 5, 25), Span("compute", "MLP", 1, 20, 30)]
    assert waiting_spans(spans) == [Span("compute", WAITING, 0, 10, 20)]


def test_waiting_at_the_end_is_seen_and_a_busy_second_stream_is_not_waiting():
    spans = [
        Span("compute", "attention", 0, 0, 10),
        Span("compute 2", "MLP", 0, 0, 40),
        Span(COMM, "all-reduce", 0, 10, 50),
    ]
    assert waiting_spans(spans) == [Span("compute", WAITING, 0, 40, 50)]


@pytest.mark.parametrize("wiring", ["standard", "ladder", TWO_STREAM, "parallel", "desync-2x"])
def test_red_adds_up_to_the_exposed_time(case, wiring):
    timeline = case.timeline(wiring, case.decode_phase())
    panel = planned_panel(case, wiring)
    red = sum(span.end - span.start for span in panel.spans if span.name == WAITING)
    assert red == pytest.approx(timeline.exposed_us(), rel=1e-6)


def test_layer_times_add_up_to_the_step(case):
    panel = planned_panel(case, "standard")
    step = case.timeline("standard", case.decode_phase()).us
    assert panel.layer_us * 80 == pytest.approx(step, rel=0.1)
    assert planned_panel(case, "ladder").layer_us < 0.75 * panel.layer_us


def test_chrome_trace_has_a_process_per_wiring_and_all_tasks(case):
    panels = [planned_panel(case, wiring) for wiring in ("standard", "ladder")]
    document = json.loads(json.dumps(chrome_trace(panels, {"setting": "x"})))
    events = document["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names[0].startswith("standard (planned, 0 %")
    complete = [e for e in events if e["ph"] == "X"]
    assert len([e for e in complete if e["pid"] == 2 and e["cat"] == "compute"]) == 161  # 160 modules and the head
    assert len([e for e in complete if e["pid"] == 2 and e["cat"] == "communication"]) == 162  # and the two edges
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in complete)
    assert {e["cname"] for e in complete if e["cat"] == "waiting"} == {"terrible"}


def test_the_picture_is_well_formed_and_shows_red_only_where_compute_waits(case):
    def count(wiring, kind):
        root = ET.fromstring(timeline_svg([planned_panel(case, wiring)]))
        return sum(r.get("class") == kind for r in root.iter(f"{SVG}rect"))

    assert count("standard", "waiting") > 4  # the legend has one
    assert count("no-comm", "waiting") == 1
    assert count("no-comm", "comm") == 1
    text = timeline_svg([planned_panel(case, "standard"), planned_panel(case, "ladder")], subtitle="a < b & c")
    assert "prefers-color-scheme:dark" in text
    assert "a &lt; b &amp; c" in text
    assert re.search(r"standard: \d+ us per layer, 0 % hidden", ET.fromstring(text).get("aria-label"))


@pytest.mark.parametrize("width", [WIDTH, NARROW])
def test_every_wiring_shows_the_same_layers_so_a_faster_one_is_shorter(case, width):
    panels = [planned_panel(case, wiring) for wiring in ("standard", "ladder", "no-comm")]
    ends = {}
    for panel in panels:
        root = ET.fromstring(timeline_svg([panels[0], panel], width=width))
        mlps = [box.find(f"{SVG}rect") for box in root.iter(f"{SVG}g") if box.find(f"{SVG}title").text.startswith("MLP")]
        assert len(mlps) == 4  # two layers of each panel
        ends[panel.title] = float(mlps[-1].get("x")) + float(mlps[-1].get("width"))
    assert ends["standard"] > ends["ladder"] > ends["no-comm"]
    ladder = timeline_svg(panels[:2], width=width)
    assert re.search(r"2 layers in \d+ us \(1\.\d\dx\)", ladder)


def test_boxes_stay_inside_the_picture(case):
    root = ET.fromstring(timeline_svg([planned_panel(case, w) for w in ("standard", "ladder", TWO_STREAM)]))
    width = float(root.get("width"))
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) >= 0
        assert float(box.get("x", 0)) + float(box.get("width")) <= width


def test_no_panel_is_an_error():
    with pytest.raises(ValueError, match="at least one wiring"):
        timeline_svg([])


def test_command_writes_both_files(tmp_path):
    arguments = ["plan", "--link", "nccl", "--wirings", "standard, ladder", "-o", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(trace_app, arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    facts = json.loads(result.output)
    assert facts["label"] == "planned"
    assert facts["wirings"][1]["hidden_percent"] > 90
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    ET.parse(tmp_path / "out" / "timeline.svg")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--tp", "1"], "nothing to wait for"),
        (["--latency", "auto"], "a latency in numbers"),
        (["--latency", "3"], "has no unit"),
        (["run", "--wirings", "standard,parallel"], "in a run of its own"),
        (["--model", "llama-9-90b"], "llama-9-90b"),
        (["--layers", "4", "--wirings", "ladder:7"], "names layer 7"),
    ],
)
def test_bad_recordings_are_refused_before_ranks_are_started(arguments, error):
    result = CliRunner().invoke(trace_app, arguments)
    assert isinstance(result.exception, ValueError)
    assert error in str(result.exception)


def test_a_folder_that_cannot_be_written(case, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write a trace to"):
        write_trace([planned_panel(case, "ladder")], {}, tmp_path / "file")


def test_command_refuses_an_unknown_wiring(tmp_path):
    result = CliRunner().invoke(trace_app, ["plan", "--wirings", "stairs", "-o", str(tmp_path)])
    assert isinstance(result.exception, ValueError)
    assert "unknown wiring" in str(result.exception)
