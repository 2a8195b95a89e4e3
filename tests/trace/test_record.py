"""Recorded timelines: ranges of the profiler become spans, and what a rank really did is in the trace."""

import json
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from ladder_residual.bench.demo import demo_directory
from ladder_residual.distributed.world import World
from ladder_residual.models.random_weights import load_or_random_model
from ladder_residual.plan.schedule import COMM, COMPUTE
from ladder_residual.report.results import read_results
from ladder_residual.trace.panel import WAITING, Span, chrome_trace, hidden_percent, in_rows, read_trace, recorded_panel
from ladder_residual.trace.record import (
    LinkTimes,
    Range,
    device_spans,
    host_spans,
    median_step,
    read_ranges,
    record,
    record_wiring,
)
from ladder_residual.trace.timeline_svg import timeline_svg
from tests.ranks import run_on_ranks

ROOT = Path(__file__).parents[2]
LINK = LinkTimes(bare=10e-6, latency=90e-6)  # 100 us on its own


def test_ranges_are_read_from_a_profiler_trace():
    document = {
        "baseTimeNanoseconds": 5000,
        "traceEvents": [
            {"ph": "X", "cat": "user_annotation", "name": "ladder-residual|compute|MLP|3|0", "ts": 7.0, "dur": 2.0},
            {"ph": "X", "cat": "user_annotation", "name": "ladder-residual|start|all-reduce of MLP|3|4", "ts": 1.0, "dur": 2.0},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 7.5, "dur": 1.0},
            {"ph": "X", "cat": "gpu_user_annotation", "name": "ladder-residual|compute|MLP|3|0", "ts": 11.0, "dur": 5.0},
            {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ts": 13.0, "dur": 4.0},
            {"ph": "i", "cat": "user_annotation", "name": "ladder-residual|compute|MLP|9|0", "ts": 1.0},
        ],
    }
    assert read_ranges(document, on_device=False) == [
        Range("start", "all-reduce of MLP", 3, 4, 6.0, 8.0),
        Range("compute", "MLP", 3, 0, 12.0, 14.0),
    ]
    kernel = Range("nccl", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0, 0, 18.0, 22.0)
    assert read_ranges(document, on_device=True) == [Range("compute", "MLP", 3, 0, 16.0, 21.0), kernel]


def an_all_reduce(wait_start, wait_end):
    return [Range("start", "all-reduce", 1, 7, 0.0, 5.0), Range("wait", "wait", 0, 7, wait_start, wait_end)]


@pytest.mark.parametrize(
    ("wait", "in_flight_until", "hidden"),
    [
        ((5.0, 105.0), 105.0, 0.0),  # waited for at once
        ((55.0, 105.0), 105.0, 50.0),  # half of it hidden
        ((200.0, 200.0), 100.0, 100.0),  # there long before
        ((200.0, 260.0), 260.0, 100 * (1 - 60 / 255)),  # the other rank was late: more than picking up what had come
    ],
)
def test_an_all_reduce_is_in_flight_until_its_result_is_there(wait, in_flight_until, hidden):
    spans = host_spans(an_all_reduce(*wait), LINK)
    assert spans == [Span(COMM, "all-reduce", 1, 5.0, in_flight_until), Span(COMPUTE, WAITING, 1, *wait)]
    assert hidden_percent(spans) == pytest.approx(hidden)


def test_the_edges_of_the_vocabulary_are_drawn_but_not_counted():
    edges = [Range("gather", "logits", 3, 0, 500.0, 600.0)]
    edges += [Range("start", "embedding all-reduce", 0, 1, 300.0, 301.0), Range("wait", "wait", 0, 1, 301.0, 450.0)]
    spans = host_spans([*an_all_reduce(55.0, 105.0), *edges], LINK)
    assert sum(s.row == COMM for s in spans) == 3
    assert hidden_percent(spans) == pytest.approx(50.0)
    assert hidden_percent([]) == 100.0


def test_on_a_gpu_the_kernels_are_the_timeline():
    starts = [Range("start", "all-reduce of attention", 0, 0, 0, 1), Range("start", "all-reduce of MLP", 0, 1, 2, 3)]
    ranges = [
        Range("compute", "attention", 0, 0, 10, 20),
        Range("nccl", "nccl", 0, 0, 20, 45),
        Range("compute", "MLP", 0, 0, 20, 40),
        Range("nccl", "nccl", 0, 0, 45, 60),
    ]
    spans = device_spans(ranges, starts)
    assert Span(COMM, "all-reduce of attention", 0, 20, 45) in spans
    assert Span(COMM, "all-reduce of MLP", 0, 45, 60) in spans
    assert hidden_percent(spans) == pytest.approx(50.0)  # 20 of 40 beside the MLP


def test_all_reduces_in_flight_together_get_rows_of_their_own():
    spans = [Span(COMM, "a", 0, 0, 10), Span(COMM, "b", 0, 5, 15), Span(COMM, "c", 0, 12, 20), Span(COMPUTE, "MLP", 0, 0, 9)]
    assert {s.name: s.row for s in in_rows(spans)} == {"a": COMM, "b": f"{COMM} 2", "c": COMM, "MLP": COMPUTE}


def test_the_step_of_median_length_is_drawn():
    def step(start, length):
        return [Span(COMPUTE, "MLP", 0, start, start + length)]

    ranks = [[step(0, 30), step(100, 10), step(200, 50)], [step(1, 10), step(105, 10), step(200, 10)]]
    assert median_step(ranks) == [step(0, 30), step(1, 10)]


def test_a_trace_is_read_back():
    spans = in_rows(host_spans(an_all_reduce(55.0, 105.0), LINK))
    panels = [recorded_panel(wiring, spans, "measured") for wiring in ("standard", "ladder")]
    assert read_trace(json.loads(json.dumps(chrome_trace(panels, {"setting": "x"})))) == panels


def spans_of_wirings(world):
    model = load_or_random_model(str(demo_directory()), world)
    link = LinkTimes(1e-4, 2e-3)
    return {spec: record_wiring(model, spec, world, link, 2, 4, 2, None) for spec in ("standard", "ladder", "no-comm")}


def test_ranks_record_their_modules_and_the_order_of_starts_and_waits():
    for found in run_on_ranks(2, spans_of_wirings):
        layers = 1 + max(span.layer for span in found["ladder"][0])
        for spec, steps in found.items():
            assert len(steps) == 2
            for spans in steps:
                compute = [s for s in spans if s.row == COMPUTE and s.name != WAITING]
                assert [(s.name, s.layer) for s in compute] == [
                    *((name, layer) for layer in range(layers) for name in ("attention", "MLP")),
                    ("head", layers - 1),
                ]
                reduces = [(a, b) for a, b in pairwise(spans) if a.row == COMM and "all-reduce of" in a.name]
                assert all(wait.name == WAITING for _, wait in reduces)
                between = [sum(c.start >= a.start and c.end <= wait.start for c in compute) for a, wait in reduces]
                # Program order, not speed: standard waits before the next module, a ladder computes it first. Behind the
                # last module there is none.
                expected = {"standard": [0] * 2 * layers, "ladder": [1] * (2 * layers - 1) + [0], "no-comm": []}
                assert between == expected[spec]


def whole_recording(world, folder):
    return record(
        world,
        source=str(demo_directory()),
        layers=None,
        wirings=["standard", "ladder"],
        latency=1e-3,
        batch=2,
        prompt=4,
        steps=2,
        dtype="float32",
        folder=Path(folder),
        profiles=True,
    )


def test_a_recording_writes_trace_picture_and_profiles(tmp_path):
    facts, other = run_on_ranks(2, whole_recording, str(tmp_path))
    assert "trace" not in other  # rank 0 alone writes
    document = json.loads(Path(facts["trace"]).read_text())
    assert [p.title for p in read_trace(document)] == [f"{w}, rank {r}" for w in ("standard", "ladder") for r in (0, 1)]
    assert document["otherData"]["latency_us"] == 1000
    assert document["otherData"]["torch"]
    label = ET.parse(facts["timeline"]).getroot().get("aria-label")
    assert label.count("% hidden") == 2  # rank 0 of each wiring
    assert len(facts["wirings"][1]["hidden_percent"]) == 2
    assert len(list(tmp_path.glob("profile-*-rank[01].json"))) == 4
    assert any("aten::" in e["name"] for e in json.loads((tmp_path / "profile-ladder-rank0.json").read_text())["traceEvents"])


ASKED = {"layers": None, "latency": 0.0, "batch": 1, "prompt": 4, "steps": 2, "dtype": "float32", "folder": Path("x")}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"steps": 0}, "--steps must be at least 1"),
        ({"batch": 0}, "--batch must be at least 1"),
        ({"wirings": ["standard", "parallel"]}, "in a run of its own"),
        ({"wirings": ["stairs"]}, "unknown wiring 'stairs'"),
        ({"source": "ladder-9b"}, "ladder-9b"),
        ({"dtype": "auto"}, "have no dtype of their own"),
        ({"source": str(demo_directory()), "layers": 1}, "is a checkpoint and measured whole"),
    ],
)
def test_bad_requests_are_refused(change, error):
    asked = {"source": "ladder-1b", "wirings": ["standard"], **ASKED, **change}
    with pytest.raises(ValueError, match=error):
        record(World(size=2, group=object()), **asked)


def test_one_rank_has_nothing_to_wait_for():
    with pytest.raises(ValueError, match="nothing to wait for"):
        record(World(), source="ladder-1b", wirings=["standard"], **ASKED)


@pytest.mark.parametrize("folder", sorted((ROOT / "results" / "trace").iterdir()), ids=lambda folder: folder.name)
def test_committed_recordings_and_their_pictures_belong_together(folder):
    [timeline] = read_results([folder]).timelines
    assert timeline.label == ("emulated" if folder.name.endswith("emulated") else "measured")
    drawn = ET.fromstring(timeline_svg(timeline.panels)).get("aria-label")
    assert drawn == ET.parse(folder / "timeline.svg").getroot().get("aria-label")
    about = json.loads((folder / "trace.json").read_text())["otherData"]
    assert {"machine", "torch", "date", "commit"} <= set(about)
