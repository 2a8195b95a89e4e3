"""``ladder plan`` from the outside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ladder_residual.plan.commands import app

runner = CliRunner()


def ok(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def test_table_and_advice():
    text = ok("--model", "llama-3-70b", "--device", "h100", "--tp", "4,8", "--link", "nccl,one-shot", "--batch", "1,16")
    assert text.count("llama-3-70b, tp") == 8
    assert "Planned, not measured" in text
    assert "convert the last 40 layers" in text


def test_json_is_one_document_with_every_row():
    document = json.loads(ok("--model", "llama-3-70b", "--tp", "4,8", "--hybrid", "--json"))
    assert document["label"] == "planned"
    assert [row["tp"] for row in document["rows"]] == [4, 8]
    assert document["rows"][0]["hybrid"][-1]["converted_layers"] == 80
    assert document["rows"][1]["advice"].startswith("llama-3-70b, tp 8")


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
        (["--model", "llama-3-70b", "--device", "h1000"], "near: h100"),
        (["--model", "llama-3-70b", "--link", "nvlink"], "unknown link"),
        (["--model", "llama-3-70b", "--tp", "3"], "does not divide the 64 attention heads"),
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


def test_validate_prints_both_kinds_of_points_and_the_verdict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no results folder here
    text = ok("validate", "--constants")
    assert "Checked points" in text
    assert "they validate nothing" in text
    assert "outside its target: sizes bloom-176b" in text
    assert "nothing is said about them" in text
    assert "nccl.in_situ_us" in text
    assert "PASSED" in text


def test_validate_json_and_exit_code_when_a_result_is_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json.loads(ok("validate", "--json"))["passed"] is True
    folder = tmp_path / "results" / "overlap"
    folder.mkdir(parents=True)
    row = {"wiring": "ladder", "median_ms": 99.0}
    bad = {"benchmark": "overlap", "layers": 2, "hidden_size": 8, "tp": 2, "batch": 1, "latency_us": 0}
    (folder / "x.json").write_text(json.dumps({**bad, "compute_ms": 1.0, "communication_ms": 1.0, "rows": [row]}))
    result = runner.invoke(app, ["validate", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["passed"] is False


def test_planning_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from ladder_residual.plan.commands import app\n"
        "try: app(['--model', 'llama-3-70b', '--device', 'h100', '--tp', '8', '--link', 'nccl'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules); print('HEAVY', sorted(heavy))"
    )
    source = str(Path(__file__).parents[1] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source, "PATH": ""}, check=True
    )
    assert "HEAVY []" in done.stdout
    assert "1." in done.stdout
