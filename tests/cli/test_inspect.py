"""``ladder inspect``."""

import json

from typer.testing import CliRunner

from ladder_residual.cli.main import app


def test_inspect_prints_text_or_json(demo_dir):
    assert "llama" in CliRunner().invoke(app, ["inspect", str(demo_dir)]).output
    found = json.loads(CliRunner().invoke(app, ["inspect", str(demo_dir), "--json"]).output)
    assert found["layers"] == 5
