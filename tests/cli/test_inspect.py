"""``ladder inspect``."""

import json

from typer.testing import CliRunner

from ladder_residual.cli.main import app


def test_inspect_prints_text_or_json(demo_dir):
    said = CliRunner().invoke(app, ["inspect", str(demo_dir)]).output
    assert "llama" in said
    assert "not tp 5, 6, 7: does not divide 8 query heads with 4 KV heads evenly: use tp in [1, 2, 4]" in said
    found = json.loads(CliRunner().invoke(app, ["inspect", str(demo_dir), "--json"]).output)
    assert found["layers"] == 5


def test_inspect_says_how_weights_are_quantised(demo_dir, tmp_path):
    done = CliRunner().invoke(app, ["convert", str(demo_dir), str(tmp_path / "fp8"), "--quantize", "fp8"])
    assert done.exit_code == 0, done.output
    assert "wiring   standard   |||||" in done.output
    said = CliRunner().invoke(app, ["inspect", str(tmp_path / "fp8")]).output
    assert "quantised   fp8 (compressed-tensors, a scale per channel)\n" in said
    assert "dequantised" in said
    assert "quantised" not in CliRunner().invoke(app, ["inspect", str(demo_dir)]).output
