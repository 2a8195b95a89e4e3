"""The page of results: what it shows, what it refuses, how browsers take it."""

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

from ladder_residual.cli.report import report
from ladder_residual.plan import hybrid_curve, plan
from ladder_residual.plan.planner import make_cases
from ladder_residual.report.page import table, write_report
from ladder_residual.report.results import Table, read_results
from ladder_residual.report.words import heading
from ladder_residual.trace.panel import planned_panel, write_trace

ROOT = Path(__file__).parents[2]
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


RECOVERY = {
    "kind": "adapt",
    "student": "mine",
    "steps": 8,
    "tokens": 8192,
    "share_of_text_percent": 40.0,
    "texts": {"books.txt": {"before": 4.0, "after": 2.2, "teacher": 2.0, "gap_closed_percent": 90.0}},
    "curve": [{"tokens": t, "texts": {"books.txt": {"loss": loss}}} for t, loss in ((0, 4.0), (8192, 2.2))],
}
EMULATED = {
    "setting": {"device": "h200", "model": "llama-3-70b", "tp": 8, "context": 1280},
    "points": [
        {"engine": "fused", "batch": 1, "allreduce_us": us, "wiring": wiring, "ms": ms}
        for us, wiring, ms in ((0, "standard", 4.6), (24, "standard", 8.4), (24, "ladder", 5.4))
    ],
}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    [(_, case)] = make_cases("llama-3.1-8b", device="h100", tp=[8], link=["nccl"], batch=[1], prompt=1024, new=512)
    rows = [row.to_dict() for row in plan("llama-3.1-8b", tp=[2, 8])]
    rows[1]["hybrid"] = [{"converted_layers": k, "speedup": gain} for k, gain in hybrid_curve(case)]
    (folder / "plan.json").write_text(json.dumps({"kind": "plan", "rows": rows}))
    (folder / "overlap.json").write_text(json.dumps(OVERLAP))
    (folder / "emulated.json").write_text(json.dumps(EMULATED))
    quality = [{"converted_layers": 8, "value": 55.5}]
    (folder / "recovered.json").write_text(json.dumps({"name": "recovered <b>", "quality": quality}))
    for name, ppl in (("original", 20.0), ("converted", 25.0)):
        rows = [{"task": "arc_easy", "metric": "acc", "value": 0.5, "stderr": 0.01, "shown": True}]
        rows += [{"task": "wikitext", "metric": "word_perplexity", "value": 33.25, "stderr": None}]
        document = {"format": "ladder-residual evaluation 1", "model": name, "rows": rows, "perplexity": {"ppl": ppl}}
        (folder / f"eval-{1 if name == 'original' else 2}.json").write_text(json.dumps(document))
    (folder / "adapt.json").write_text(json.dumps(RECOVERY))
    (folder / "other.json").write_text(json.dumps({"benchmark": "decode", "rows": [{"batch": 1, "ms": 3.25, "note": None}]}))
    recorded = [
        replace(planned_panel(case, w), title=f"{w}, rank {r}", label="measured")
        for w in ("standard", "ladder")
        for r in (0, 1)
    ]
    write_trace(recorded, {"setting": "two <ranks>", "label": "measured"}, folder)
    write_trace([planned_panel(case, "ladder")], {"setting": "one plan", "label": "planned"}, folder / "planned")
    files = [*sorted(folder.glob("*.json")), folder / "planned" / "trace.json"]
    write_report(files, folder / "out" / "report.html", folder / "plots")
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
    assert any(table.title == "Tasks: adapt" and "original" in table.rows[0] for table in results.tables)
    assert len(results.timelines) == 2
    selections = {chart.title.partition(":")[0]: chart for chart in results.charts if chart.key.startswith("selection")}
    assert set(selections) == {"SmolLM2-135M-Instruct", "stories15M"}
    layers = {len(series.points) for chart in selections.values() for series in chart.series}
    assert layers == {31, 7}  # none converted to all, of 30 and of 6
    assert sum(chart.key.startswith("steps") for chart in results.charts) >= 10
    assert len({chart.key for chart in results.charts}) == len(results.charts)


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
        "Decode steps: tp 2, batch 1, gloo + 500 us",
        "Plan: plan",
        "Emulated rank: emulated",
        "94 %",
        "3.25",
        "recovered &lt;b&gt;",
        "llama-3.1-8b: speed-up by converted layers",
        "fused on h200, tp 8, batch 1",
    ):
        assert expected in text
    for label in ("planned", "emulated", "measured"):
        assert f'<span class="badge">{label}</span>' in text
    assert text.count("<figure") == 2 + 4  # timelines and charts


def test_my_results_come_first_and_the_planners_validation_only_on_request(page, tmp_path):
    text = page.read_text()
    order = [
        "<ul",
        "<h2>Comparison",
        "<h2>Quality",
        "<h2>Curves",
        "<h2>Timelines",
        "<h2>Other",
        "<h2>Plan",
        "<h2>Where numbers",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    for sentence in (
        "ladder decodes 1.45x as fast as standard (16.5 ms a step, 94 % of the communication hidden).",
        "converted: perplexity 25.00 against 20.00 of original.",
        "mine, recovery on books.txt: held-out loss from 4.0000 to 2.2000, 90 % of the gap to the teacher closed.",
    ):
        assert sentence in text[: places[1]]
    assert '<td data-label="original">50.0 ± 1.0</td>' in text
    assert '<td data-label="original">33.250</td>' in text  # a perplexity is no share
    assert "error of the plan" not in text
    assert "standard, planned</text>" not in text
    write_report([page.parents[1] / "emulated.json"], tmp_path / "checked.html", validation=True)
    checked = (tmp_path / "checked.html").read_text()
    assert "How well the plan predicts" in checked
    assert "fitted on it" in checked  # fit points show no error
    assert "standard, planned</text>" in checked


def test_what_every_row_says_is_said_once():
    rows = tuple((f"row {k}", "h200", "") for k in range(5))
    text = table(Table("t", "measured", "a bench", ("name", "device", "note"), rows))
    assert "a bench; device h200" in text
    assert text.count("h200") == 1
    assert "<th>note" not in text


def test_two_results_of_one_setting_show_their_own_bars(tmp_path):
    slower = {**OVERLAP, "rows": [{**row, "median_ms": 2 * row["median_ms"]} for row in OVERLAP["rows"]]}
    for name, document in (("first", OVERLAP), ("second", slower)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    write_report([tmp_path], tmp_path / "out" / "report.html")
    text = (tmp_path / "out" / "report.html").read_text()
    assert [text.count(f"<b>{ms} ms</b>") for ms in ("24.0", "16.5", "48.0", "33.0")] == [1, 1, 1, 1]


def test_no_field_name_is_shown_raw():
    """Of every result of this repository: words, not identifiers."""
    results = read_results([ROOT / "results"])
    for one in results.tables:
        assert not [column for column in one.columns if "_" in column], one.title
        assert "_" not in one.title.partition(":")[0]
    assert [heading(name) for name in ("prefill_ms", "tokens_per_second", "peak_memory_gb", "n")] == [
        "prefill, ms",
        "tokens/s",
        "peak memory, GB",
        "n",
    ]


def test_recorded_timelines_show_the_first_rank(page):
    text = page.read_text()
    assert "two &lt;ranks&gt;" in text
    assert "rank 0" not in text.split("one plan")[0]
    assert len(re.findall(r'aria-label="(standard: [^"]*; ladder: [^"]*)"', text)) == 2  # for screens and for phones
    assert re.search(r'aria-label="ladder: [^;"]*"', text)


def test_dark_and_light_and_phone(page):
    text = page.read_text()
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport" content="width=device-width,initial-scale=1"' in text


def test_charts_are_files_too(page):
    plots = sorted((page.parents[1] / "plots").glob("*.svg"))
    assert [file.stem.partition("-")[0] for file in plots] == ["hybrid", "quality", "recovery", "steps"]
    for file in plots:
        ET.parse(file)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a readable JSON"),
        ("[]", "must hold a JSON object"),
        ('{"a": 1}', "is no result this page knows: it has a"),
        (
            '{"kind": "plan", "rows": [{"tp": 8}]}',
            "no plan of `ladder plan --json` that can be shown; missing or wrong: 'speedup'",
        ),
        ('{"kind": "plan", "rows": [8]}', "no plan of `ladder plan --json` that can be shown"),
        ('{"quality": [{"value": 1}]}', "no list of converted_layers and value"),
        ('{"quality": []}', "it has no points"),
        ('{"curves": {"held-out": {}}, "original": {}}', "no selection of `ladder convert --wiring auto`"),
        ('{"selection": {}, "runs": [{"name": "x"}]}', "no selection of `ladder convert --wiring auto`"),
        ('{"tasks": "arc", "models": {"a": {"arc": 1}}}', "no table of `ladder eval`"),
        ('{"benchmark": "overlap"}', "no result of `ladder bench overlap` that can be shown; missing or wrong: 'rows'"),
        ('{"points": [{"device": "h200"}]}', "no result of `ladder bench decode` on an emulated rank"),
        ('{"traceEvents": []}', "no trace of `ladder trace` that can be shown; missing or wrong: 'otherData'"),
        ('{"traceEvents": [1], "otherData": {}}', "no trace of `ladder trace`"),
    ],
)
def test_bad_results_are_refused(tmp_path, content, says):
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=says):
        read_results([file])


@pytest.mark.parametrize("change", [{"task": True}, {"stderr": "much"}, {"value": None}, {"task": [1]}])
def test_an_evaluation_holds_anything(tmp_path, change):
    """Of any kind of value: shown, or refused in one line."""
    row = {"task": "arc_easy", "metric": "acc", "value": 0.5, "stderr": 0.01} | change
    document = {"format": "ladder-residual evaluation 1", "model": "m", "wiring": 5, "rows": [row]}
    (tmp_path / "eval.json").write_text(json.dumps(document))
    try:
        write_report([tmp_path], tmp_path / "out" / "report.html")
    except ValueError as error:
        assert "that can be shown; missing or wrong" in str(error)
        assert "task" not in change


def test_of_a_checkpoint_its_results_are_shown(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no JSON results"):
        read_results([tmp_path])
    (tmp_path / "adapt.json").write_text(
        '{"kind": "adapt", "student": "s", "tokens": 9, "steps": 1, "share_of_text_percent": 50, "texts": {"t": {"after": 1.5}}}'
    )
    assert read_results([tmp_path]).summary == ["s, recovery on t: held-out loss to 1.5000."]


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*nothing: No such file or directory; give JSON results"):
        read_results([tmp_path / "nothing"])


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no JSON results"):
        read_results([tmp_path])


def test_the_command_writes_its_page(tmp_path):
    app = typer.Typer()
    app.command()(report)
    out = tmp_path / "r.html"
    done = CliRunner().invoke(app, [str(ROOT / "results" / "overlap"), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "ladder bench overlap" in out.read_text()
    assert "give the results to show" in str(CliRunner().invoke(app, ["-o", str(out)]).exception)


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
