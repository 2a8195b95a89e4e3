"""The sweep over sizes, small: what is run, that it goes on, and what the report makes of it."""

import json

import pytest

from lab.reports.training import size_gaps, size_section, trend
from lab.runs.train_sizes import DEPTHS, SIZES, Plan, Run, sweep
from tests.tiny_training import tiny_corpus


def small(tmp_path):
    corpus = tiny_corpus(tmp_path / "corpus")
    model = dict(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, vocab_size=512)
    settings = {f"model.{key}": value for key, value in model.items()} | {
        "data.train": corpus,
        "data.valid": corpus,
        "data.sequence": 16,
        "batch.rows": 8,
        "run.steps": 4,
        "run.precision": "fp32",
        "run.compile": "false",
        "run.device": "cpu",
        "evaluate.every": 2,
        "evaluate.rows": 4,
        "optimizer.warmup": 1,
    }
    overrides = tuple(f"{key}={value}" for key, value in settings.items())
    return Plan(("15m",), {"15m": 2}, (1e-4, 1e-2), ("delayed-1",), (), overrides)


def test_a_sweep_goes_on_where_it_was_and_its_report_shows_it(tmp_path):
    plan, out = small(tmp_path), tmp_path / "sizes.json"
    assert not sweep(plan, out, tmp_path / "runs", seconds=0)
    assert not out.exists()
    assert sweep(plan, out, tmp_path / "runs", seconds=600)
    document = json.loads(out.read_text())
    runs = {run["run"]: run for run in document["runs"]}
    assert len(runs) == 4 + 2 + 1  # the best of the sweep is the first seed
    assert {run["lr"] for run in runs.values() if run["seed"] == 1} == {1e-2}
    assert [step for step, _ in runs["15m-ladder-1.00e-02-0"]["valid"]] == [2, 4]
    assert runs["15m-delayed-1-1.00e-02-0"]["tokens_per_s"] > 0
    out.write_text(json.dumps(document | {"runs": document["runs"][:-3]}))
    assert sweep(plan, out, tmp_path / "runs", seconds=600)
    again = {run["run"]: run["valid"] for run in json.loads(out.read_text())["runs"]}
    assert again == {name: run["valid"] for name, run in runs.items()}
    page = size_section(document)
    assert "| 15m | 0M | 2 |" in page


def test_sizes_and_depths_have_the_parameters_they_are_named_by(tmp_path):
    plan = Plan()
    sizes = [plan.recipe(Run(size, "ladder", 1e-3), tmp_path).model.shape().parameters / 1e6 for size in SIZES]
    assert sizes == [pytest.approx(float(size[:-1]), rel=0.05) for size in SIZES]
    for depth in DEPTHS:
        shape = plan.recipe(Run("47m", "ladder", 1e-3, 0, depth), tmp_path).model.shape()
        assert (shape.num_layers, shape.parameters / 1e6) == (depth, pytest.approx(47, rel=0.02))


def test_the_trend_of_the_gap():
    runs = [
        dict(
            size=size,
            wiring=wiring,
            seed=seed,
            depth=None,
            parameters=parameters,
            valid=[[1, 9.0], [2, loss]],
            tokens_per_s=1.0,
        )
        for size, parameters, gaps in (("15m", 1e7, (0.01, 0.03)), ("125m", 1e8, (0.0, 0.02)))
        for seed, gap in enumerate(gaps)
        for wiring, loss in (("standard", 3.0), ("ladder", 3.0 * (1 + gap)))
    ]
    gaps = size_gaps({"runs": runs})
    assert gaps == [(1e7, pytest.approx(1.0)), (1e7, pytest.approx(3.0)), (1e8, pytest.approx(0.0)), (1e8, pytest.approx(2.0))]
    slope, error = trend(gaps)
    assert slope == pytest.approx(-1.0)
    assert error == pytest.approx(2**0.5)  # four deviations of one per cent, two degrees of freedom, a spread of one
