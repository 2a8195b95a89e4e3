"""Kernels of an engine step, as the profiler lists them, become modules, all-reduces and waiting."""

from dataclasses import replace

import pytest

from lab.profile import rows_of_layer
from ladder_residual.engine.spec import RankSizes
from ladder_residual.models.presets import presets
from ladder_residual.plan.schedule import COMM, COMPUTE, COMPUTE_2
from ladder_residual.trace.engine import Kernel, engine_spans, read_kernels, record_engine
from ladder_residual.trace.panel import WAITING, hidden_percent


def kernel(name: str, stream: int, start: float, length: float = 1.0) -> Kernel:
    return Kernel(name, stream, start, start + length)


def layer(stream: int, start: float) -> list[Kernel]:
    names = ["norm_gemv", "decode_attention", "merge_splits", "gemv", "persistent_norm_gemv", "gemv"]
    return [kernel(name, stream, start + index) for index, name in enumerate(names)]


def test_modules_of_one_chain_and_their_all_reduces() -> None:
    kernels = [
        kernel("embed", 7, 0),
        kernel("timed_copy", 7, 1, 4),
        *layer(7, 5),
        *layer(5, 15),  # a replayed graph changes streams within a chain
        kernel("norm_gemv", 7, 25),
    ]
    kernels += [kernel("timed_copy", 9, 9, 2), kernel("timed_copy", 9, 11, 4)]  # the second is exposed from 11 to 15
    spans = engine_spans(kernels)
    modules = [(s.name, s.layer, s.start, s.end) for s in spans if s.row == COMPUTE and s.name != WAITING]
    assert modules == [
        ("attention", 0, 5, 9),
        ("MLP", 0, 9, 11),
        ("attention", 1, 15, 19),
        ("MLP", 1, 19, 21),
        ("head", 1, 25, 26),
    ]
    reduces = [(s.name, s.layer) for s in spans if s.row == COMM]
    assert reduces == [("embedding all-reduce", 0), ("all-reduce", 0), ("all-reduce", 0)]
    waits = [(s.start, s.end) for s in spans if s.name == WAITING]
    assert waits == [(1, 5), (11, 15)]
    assert hidden_percent(spans) == pytest.approx(100 * (1 - 4 / 6))


def test_two_chains_get_rows_of_their_own() -> None:
    attention = [kernel("persistent_norm_gemv", 3, 0), kernel("decode_attention", 3, 1), kernel("gemv", 3, 2)]
    mlp = [kernel("norm_gemv", 4, 0.5), kernel("gemv", 4, 1.5)]
    spans = engine_spans([*attention, *mlp, kernel("norm_gemv", 4, 5)], num_chains=2)
    assert [(s.name, s.row) for s in spans] == [("attention", COMPUTE), ("MLP", COMPUTE_2), ("head", COMPUTE_2)]


def test_an_all_reduce_belongs_to_the_layer_the_plan_names() -> None:
    """Parallel has one all-reduce a layer."""
    kernels = [kernel("embed", 7, 0), kernel("timed_copy", 7, 1), *layer(7, 2), kernel("timed_copy", 7, 8)]
    kernels += [*layer(7, 9), kernel("timed_copy", 7, 15), kernel("norm_gemv", 7, 16)]
    assert [s.layer for s in engine_spans(kernels, all_reduce_layers=[0, 1]) if s.row == COMM] == [0, 0, 1]


def test_where_the_time_of_a_layer_goes() -> None:
    """Eight layers, of which the middle ones count; kernels that are launched early overlap, and those of a layer are told apart."""
    sizes = RankSizes.of(replace(presets()["llama-3-70b"], num_layers=8), 8, 0)
    kernels = [kernel("embed", 7, 0), kernel("timed_copy", 7, 1), kernel("norm_gemv", 7, 500)]
    for number in range(8):
        at = 10.0 + 50 * number + (number == 0)  # the first begins late, which must not show
        kernels += [
            kernel("persistent_norm_gemv", 7, at - 3, 8),
            kernel("persistent_norm_gemv", 7, at - 1, 30),
            kernel("decode_attention", 5, at + 5, 4),
            kernel("gemv", 5, at + 6, 20),
            kernel("gemv", 7, at + 25, 20),
            kernel("timed_copy", 9, at + 26, 6),
            kernel("timed_copy", 8, at + 45.5, 6),
        ]
    rows = {row["kernel"]: row for row in rows_of_layer(kernels, sizes, 4.5e12)}
    assert list(rows) == ["QKV", "attention", "output", "gate/up", "attention all-reduce", "down", "MLP all-reduce"]
    spans = {name: (row["begins_us"], row["ends_us"]) for name, row in rows.items()}
    assert spans["QKV"] == (2.0, 10.0)  # from the end of down before, 5 us ahead of a layer's start
    assert spans["gate/up"] == (4.0, 34.0)
    assert spans["output"] == (11.0, 31.0)
    assert spans["down"] == (30.0, 50.0)
    assert spans["MLP all-reduce"] == (50.5, 56.5)
    assert rows["down"]["reading_us"] == round(8192 * 3584 * 2 / 4.5e6, 2)
    assert "reading_us" not in rows["attention"]


def test_only_kernels_are_read() -> None:
    document = {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "embed", "ts": 4.0, "dur": 2.0, "args": {"stream": 7}},
            {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 1.0, "dur": 2.0, "args": {"stream": 7}},
        ]
    }
    assert read_kernels(document) == [Kernel("embed", 7, 4.0, 6.0)]


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ("serial", "needs a CUDA device"),
        ("interleaved", "got --schedule interleaved: choose auto, serial or two_stream"),
    ],
)
def test_what_cannot_be_recorded(tmp_path, monkeypatch, schedule: str, problem: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=problem):
        record_engine(
            model="llama-3-70b", layers=2, tp=8, link="24us", wirings=["ladder"], context=64, schedule=schedule, folder=tmp_path
        )
