"""The page, its charts and the generated document."""

import importlib.util
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ladder_residual.plan import plan
from ladder_residual.plan.charts import PLANNED, Chart, Series, chart_png, chart_svg, nice_ticks
from ladder_residual.plan.figures import all_charts, reference_case
from ladder_residual.plan.points import document, repository_results
from ladder_residual.plan.report import write_report
from ladder_residual.plan.report_commands import report, reproduction
from ladder_residual.plan.reproduction import reproduction_markdown
from ladder_residual.plan.results import read_results
from ladder_residual.plan.trace import planned_panel, write_trace
from ladder_residual.plan.validate import validate

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
OVERLAP = {
    "benchmark": "overlap",
    "link": "gloo + 500 us",
    "layers": 8,
    "hidden_size": 1024,
    "tp": 2,
    "batch": 1,
    "latency_us": 500.0,
    "compute_ms": 16.0,
    "communication_ms": 8.0,
    "rows": [
        {"wiring": "standard", "median_ms": 24.0, "p25_ms": 23.0, "p75_ms": 25.0, "speedup": 1.0, "hidden_percent": 0.0},
        {"wiring": "ladder", "median_ms": 16.5, "p25_ms": 16.0, "p75_ms": 17.0, "speedup": 1.45, "hidden_percent": 94.0},
    ],
}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    rows = [row.to_dict() for row in plan("llama-3.1-8b", tp=[2, 8])]
    (folder / "plan.json").write_text(json.dumps({"kind": "plan", "rows": rows}))
    (folder / "overlap.json").write_text(json.dumps(OVERLAP))
    (folder / "emulated.json").write_text(json.dumps(document("emulated")))
    (folder / "healed.json").write_text(json.dumps({"name": "healed <b>", "quality": [{"converted_layers": 8, "value": 55.5}]}))
    (folder / "other.json").write_text(json.dumps({"benchmark": "decode", "rows": [{"batch": 1, "ms": 3.25, "note": None}]}))
    case = reference_case(link="nccl")
    recorded = [
        replace(planned_panel(case, w), title=f"{w}, rank {r}", label="measured")
        for w in ("standard", "ladder")
        for r in (0, 1)
    ]
    write_trace(recorded, {"setting": "two <ranks>", "label": "measured"}, folder)
    write_trace([planned_panel(case, "ladder")], {"setting": "one plan", "label": "planned"}, folder / "planned")
    files = [*sorted(folder.glob("*.json")), folder / "planned" / "trace.json"]
    write_report(files, folder / "out" / "report.html", folder / "plots", png=HAS_MATPLOTLIB)
    return folder / "out" / "report.html"


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.addresses = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href") and value]


def test_every_result_of_this_repository_is_known_to_the_page():
    results = read_results([ROOT / "results"])
    assert {"SmolLM2-135M-Instruct", "stories15M"} <= {found["name"] for found in results.selections}
    assert any(table.title == "Tasks: adapt" and "original" in table.rows[0] for table in results.tables)
    assert len(results.timelines) == 2
    charts = {chart.key: chart for chart in all_charts(results.quality, results.selections)}
    layers = {len(series.points) for key in charts if key.startswith("selection") for series in charts[key].series}
    assert layers == {31, 7}  # none converted to all, of 30 and of 6


def test_the_page_needs_no_network_and_no_script(page):
    text = page.read_text()
    parser = Links()
    parser.feed(text)
    assert "script" not in parser.tags
    assert parser.addresses == ["data:,"]
    assert "@import" not in text
    assert "url(" not in text


def test_the_page_shows_every_result_with_its_label(page):
    text = page.read_text()
    for expected in (
        "Overlap: overlap",
        "Plan: plan",
        "Emulated rank: emulated",
        "94 %",
        "3.25",
        "bloom-176b",
        "healed &lt;b&gt;",
    ):
        assert expected in text
    assert "fitted on it" in text  # fit points show no error
    for label in ("planned", "emulated", "measured", "paper"):
        assert f'<span class="badge">{label}</span>' in text
    assert text.count("<figure") == 1 + 2 + len(all_charts())


def test_recorded_timelines_show_the_first_rank(page):
    text = page.read_text()
    assert "two &lt;ranks&gt;" in text
    assert "rank 0" not in text.split("one plan")[0]
    labels = re.findall(r'aria-label="(standard: [^"]*; ladder: [^"]*)"', text)
    assert len(labels) == 2  # the planned one of the page itself, and the recorded one
    assert re.search(r'aria-label="ladder: [^;"]*"', text)


def test_dark_and_light_and_phone(page):
    text = page.read_text()
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport" content="width=device-width,initial-scale=1"' in text


def test_plots_are_files_too(page):
    plots = page.parents[1] / "plots"
    keys = {chart.key for chart in all_charts()}
    assert {file.stem for file in plots.glob("*.svg")} == keys
    for file in plots.glob("*.svg"):
        ET.parse(file)


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_plots_are_png_files_too(page):
    pictures = list((page.parents[1] / "plots").glob("*.png"))
    assert {file.stem for file in pictures} == {chart.key for chart in all_charts()}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in pictures)


def test_a_chart_places_points_where_their_values_are():
    chart = Chart("x", "a < b", "x", "y", [Series("line", [(0, 1), (10, 3)], PLANNED)])
    root = ET.fromstring(chart_svg(chart))
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle")]
    assert dots[0][0] < dots[1][0]
    assert dots[0][1] > dots[1][1]  # larger is higher
    with pytest.raises(ValueError, match="no points"):
        chart_svg(Chart("x", "t", "x", "y", [Series("none", [])]))


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.5), (0.97, 1.04), (4.0, 17.5), (41.65, 56.24)])
def test_ticks_are_round_and_cover_the_data(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 3 <= len(ticks) <= 8


def test_png_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    import builtins

    real = builtins.__import__

    def absent(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        chart_png(all_charts()[0], tmp_path / "x.png")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a readable JSON"),
        ("[]", "must hold a JSON object"),
        ('{"a": 1}', "is no result this page knows: it has a"),
        ('{"kind": "plan", "rows": [{"tp": 8}]}', "lacks link, batch"),
        ('{"quality": [{"value": 1}]}', "quality must be a list of converted_layers and value"),
        ('{"quality": []}', "quality has no points"),
        ('{"curves": {"held-out": {}}, "original": {}}', "no curves as `ladder convert --wiring auto` writes them"),
        ('{"selection": {}, "runs": [{"name": "x"}]}', "no curves as `ladder convert --wiring auto` writes them"),
        ('{"tasks": "arc", "models": {"a": {"arc": 1}}}', "no tasks as `ladder eval` scores them"),
        ('{"benchmark": "overlap"}', "lacks rows"),
        ('{"traceEvents": []}', "none that `ladder trace` wrote; missing or wrong: 'otherData'"),
        ('{"traceEvents": [1], "otherData": {}}', "none that `ladder trace` wrote"),
    ],
)
def test_bad_results_are_refused(tmp_path, content, says):
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=says):
        read_results([file])


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no JSON results"):
        read_results([tmp_path])


def make_app() -> typer.Typer:
    app = typer.Typer()
    app.command("report")(report)
    app.command("reproduction")(reproduction)
    return app


def test_commands_write_their_files(tmp_path):
    out, doc = tmp_path / "r.html", tmp_path / "docs" / "reproduction.md"
    runner = CliRunner()
    assert runner.invoke(make_app(), ["report", "-o", str(out), "--no-png"]).exit_code == 0
    assert "No result files were given" in out.read_text()
    assert runner.invoke(make_app(), ["reproduction", "-o", str(doc), "--check"]).exit_code == 1
    assert runner.invoke(make_app(), ["reproduction", "-o", str(doc)]).exit_code == 0
    assert runner.invoke(make_app(), ["reproduction", "-o", str(doc), "--check"]).exit_code == 0


def test_the_committed_reproduction_is_what_the_command_writes():
    root = Path(__file__).parents[1]
    written = reproduction_markdown(validate(*repository_results(root)))
    assert (root / "docs" / "reproduction.md").read_text() == written, "run `ladder reproduction`"


def test_reproduction_holds_every_number_of_the_paper_and_no_error_of_a_fitted_one():
    text = reproduction_markdown()
    for row in document("paper")["points"]:
        if row["quantity"] == "tokens_per_second":
            assert re.search(rf"\b{row['value']:.1f}|{row['value']:.3f}\b", text), row
    for table in document("paper")["quality"].values():
        for name in table["rows"]:
            assert f"| {name} |" in text
    for line in text.splitlines():
        if "*fitted*" in line and "| 1 | 1 |" not in line:
            assert line.startswith(("|", "construction", "**measured**")), line
    assert "(outside its target)" in text


chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--allow-file-access-from-files",
]


def browse(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    return subprocess.run([chromium, *FLAGS, profile, *arguments], capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.skipif(chromium is None, reason="no chromium on this machine")
def test_chromium_opens_the_page_from_a_file_without_console_errors(page, tmp_path):
    picture = tmp_path / "page.png"
    done = browse(tmp_path, "--window-size=1280,3000", f"--screenshot={picture}", page.as_uri())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000  # not a blank page
    assert "CONSOLE" not in done.stderr


@pytest.mark.skipif(chromium is None, reason="no chromium on this machine")
def test_the_page_does_not_scroll_sideways_on_a_phone(page, tmp_path):
    """A frame of 390 pixels measures the page inside it; wide tables scroll in their own boxes."""
    probe = tmp_path / "probe.html"
    probe.write_text(
        f'<iframe id="f" src="{page.as_uri()}" width="390" height="800" style="border:0"></iframe><p id="out"></p><script>'
        'const f=document.getElementById("f");f.onload=()=>{const d=f.contentDocument.documentElement;'
        'document.getElementById("out").textContent="WIDTH "+d.scrollWidth+" FONT "+'
        "f.contentWindow.getComputedStyle(f.contentDocument.body).fontSize;};</script>"
    )
    done = browse(tmp_path, "--virtual-time-budget=4000", "--dump-dom", probe.as_uri())
    found = re.search(r"WIDTH (\d+) FONT (\d+)px", done.stdout)
    assert found, done.stdout[:400]
    assert int(found[1]) <= 390
    assert int(found[2]) >= 15
