"""``ladder plan`` from the outside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ladder_residual.cli.plan import plan

app = typer.Typer()
app.command()(plan)
runner = CliRunner()


def ok(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


EIGHT = ("--model", "llama-3-70b", "--device", "h100", "--tp", "4,8", "--link", "nccl,one-shot", "--batch", "1,16")


def at(width: int, monkeypatch, *arguments: str) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    return ok(*arguments).splitlines()


def test_the_verdict_comes_first(monkeypatch):
    first = at(300, monkeypatch, "--model", "llama-3-70b")[0]
    assert first.startswith("Convert llama-3-70b (tp 8, nccl, batch 1): ladder on all 80 layers gives 1.4")
    assert at(300, monkeypatch, *EIGHT)[0].startswith("Worth converting in 7 of 8 cases; the best: convert llama-3-70b (tp 8")


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("arguments", [("--model", "llama-3-70b"), EIGHT], ids=["one case", "eight"])
def test_what_is_printed_fits_the_terminal_and_nothing_is_cut(width, arguments, monkeypatch):
    lines = at(width, monkeypatch, *arguments)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    text = "\n".join(lines)
    assert "Planned, not" in text
    wirings_are_rows = any(line.split()[:1] == ["desync-4x"] and "x" in line.split()[1] + line.split()[2] for line in lines)
    assert wirings_are_rows == (width == 80)
    assert ("limited by" in text) == (width == 200)


def test_a_pipe_is_80_columns_and_wide_shows_all(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, ok("--model", "llama-3-70b").splitlines())) <= 80
    text = ok(*EIGHT, "--wide")
    assert max(map(len, text.splitlines())) > 140
    assert text.count("Where a decode step goes") == 8
    assert "limited by" in text
    assert text.count("onvert llama-3-70b (tp ") == 1 + 8  # the verdict, and every case's own


def test_bars_are_as_long_as_their_steps(monkeypatch):
    lines = at(100, monkeypatch, "--model", "llama-3-70b")
    bars = {line[:18].strip(): line for line in lines if "█" in line and line.split()[-1][0].isdigit()}
    lengths = {name: sum(map(bar.count, "█▓░")) for name, bar in bars.items()}
    times = {name: float(bar.split()[-1]) for name, bar in bars.items()}
    for name, length in lengths.items():
        assert length == pytest.approx(lengths["standard"] * times[name] / times["standard"], abs=1.1)
    assert bars["standard"].count("░") > 10 > bars["ladder"].count("░")
    assert bars["ladder"].count("▓") > 10
    assert bars["no-comm"].count("░") == 0


def test_json_is_one_document_with_every_row():
    document = json.loads(ok("--model", "llama-3-70b", "--tp", "4,8", "--hybrid", "--json"))
    assert document["label"] == "planned"
    assert [row["tp"] for row in document["rows"]] == [4, 8]
    assert document["rows"][0]["hybrid"][-1]["converted_layers"] == 80
    assert document["rows"][1]["advice"].startswith("Convert llama-3-70b (tp 8")
    parts = document["rows"][1]["step_ms"]["ladder"]
    assert sum(parts.values()) == pytest.approx(document["rows"][1]["ms_per_token"]["ladder"])


def test_hybrid_draws_the_curve():
    text = ok("--model", "llama-3.1-8b", "--tp", "8", "--hybrid")
    bars = [line for line in text.splitlines() if line.strip().endswith("#")]
    assert len(bars) >= 10
    assert len(bars[-1]) > len(bars[0])


def test_a_row_that_does_not_fit_says_so():
    assert "does not fit 80 GB" in ok("--model", "llama-3-70b", "--tp", "1,8")


def test_list_names_everything():
    text = ok("--list")
    assert all(word in text for word in ("llama-3-70b", "rtx-pro-6000", "nccl-no-p2p", "fused"))
    assert set(json.loads(ok("--list", "--json"))) == {"models", "devices", "links", "engines"}


def test_hardware_file_of_the_user(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[links.cable]\nalpha_us = 500\nbandwidth_gbs = 1\n")
    document = json.loads(ok("--model", "llama-3.1-8b", "--tp", "2", "--link", "cable", "--hardware", str(file), "--json"))
    assert document["rows"][0]["allreduce_us"] == pytest.approx(500 + 8192 / 1e3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "say which model"),
        (["--model", "llama-3-7b"], "unknown model"),
        (["--model", "llama-3-70b", "--tp", "2,x"], "--tp takes whole numbers"),
        (["--model", "llama-3-70b", "--batch", "0"], "--batch takes whole numbers above 0"),
        (["--model", "llama-3-70b", "--device", "h1000"], "did you mean 'h100'"),
        (["--model", "llama-3-70b", "--link", "nvlink"], "unknown link"),
        (["--model", "llama-3-70b", "--tp", "3"], "tp=3 does not divide 64 query heads"),
        (["--model", "llama-3-70b", "--tp", "1"], "does not fit"),
        (["--model", "llama-3-70b", "--engine", "magic"], "unknown engine"),
        (["--model", "llama-3.1-405b", "--device", "h200", "--tp", "16"], "at most 8 ranks"),
    ],
)
def test_bad_input_is_a_value_error_of_one_sentence(arguments, says):
    result = runner.invoke(app, arguments)
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)
    assert "\n" not in str(result.exception)


def test_planning_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from ladder_residual.cli.main import app\n"
        "try: app(['plan', '--model', 'llama-3-70b', '--device', 'h100', '--tp', '8', '--link', 'nccl'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules); print('HEAVY', sorted(heavy))"
    )
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source, "PATH": ""}, check=True
    )
    assert "HEAVY []" in done.stdout
    assert "1." in done.stdout
