"""The pages about the planner: its validation as HTML, and the tables of the paper as Markdown."""

import xml.etree.ElementTree as ET

from typer.testing import CliRunner

from lab.planner.__main__ import app
from lab.planner.figures import all_charts
from lab.planner.points import document, repository_results
from lab.planner.validate import KNOWN_MISSES, validate
from lab.reports.reproduction import render


def test_the_validation_page_and_its_charts(tmp_path):
    page, plots = tmp_path / "out" / "planner.html", tmp_path / "plots"
    done = CliRunner().invoke(app, ["report", "-o", str(page), "--plots", str(plots)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert text.count("<figure") == 1 + len(all_charts())
    assert "bloom-176b" in text
    for label in ("planned", "emulated", "measured", "paper"):
        assert f'<span class="badge">{label}</span>' in text
    assert "<script" not in text
    assert {file.stem for file in plots.glob("*.svg")} == {chart.key for chart in all_charts()}
    for file in plots.glob("*.svg"):
        ET.parse(file)


def test_the_reproduction_page_holds_the_speedups_of_the_paper_and_marks_fitted_ones():
    validation = validate(*repository_results())
    text = render(validation)
    for row in document("paper")["points"]:
        if row["quantity"] == "speedup":
            assert f"| {row['value']:.2f}x |" in text, row
    fitted = sum(
        c.point.role == "fit" and c.point.quantity == "speedup"
        for c in validation.comparisons
        if c.point.group in ("70B table", "405B") or c.point.group.startswith("sizes")
    )
    assert text.count("x* |") == fitted > 0
    for miss in KNOWN_MISSES:
        assert (miss.why in text) == miss.group.startswith(("sizes", "405B"))
