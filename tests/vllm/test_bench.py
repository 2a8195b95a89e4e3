"""Measuring, as docs/serving.md types it, on the smallest models: what comes out, not how fast."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import guide
import pytest
from engines import end_group, environment

from lab.hosts.delayed_link import why_not


def run_small(folder: Path, command: str, *small: str) -> dict[str, Any]:
    """The result of one of the page's commands, with sizes that take a minute instead of many."""
    out = folder / "measured.json"
    out.unlink(missing_ok=True)
    settings = guide.with_programs(environment(folder, 1))
    process = subprocess.Popen([*guide.words(command), *small, "--out", str(out)], env=settings, start_new_session=True)
    try:
        assert process.wait(600) == 0
    finally:
        end_group(process)
    return json.loads(out.read_text())


@pytest.mark.skipif(why_not() is not None, reason=f"no network namespaces here: {why_not()}")
def test_serving_over_a_slow_link(folder: Path) -> None:
    (command,) = [command for command in guide.commands("Measuring") if "--link 1ms" in command]
    model = ["--layers", "2", "--hidden", "256", "--eager"]
    load = ["--rounds", "1", "--prompts", "2", "--rates", "inf", "--new-tokens", "4"]
    one_server = ["--wirings", "ladder"]  # each takes half a minute to start
    result = run_small(folder, command, *one_server, *model, *load)
    assert result["link"] == "1.00 ms one way"
    (row,) = result["rows"]
    assert row["wiring"] == "ladder"
    # The all-reduce of the embeddings and the logits cross the link at every token, whatever the wiring hides: 1 ms each at the least.
    assert row["tpot_ms"] > 2


def test_what_a_wiring_costs_on_one_rank(folder: Path) -> None:
    (command,) = [command for command in guide.commands("Measuring") if "one_rank" in command]
    load = ["--modes", "eager", "--rounds", "1", "--processes", "1", "--new-tokens", "4"]
    result = run_small(folder, command, "--wirings", "ladder", "--layers", "2", *load)
    rows = {row["engine"]: row for row in result["rows"]}
    assert list(rows) == ["vllm", "ladder", "vllm again"]
    assert 0 < rows["ladder"]["ops"] <= rows["vllm"]["ops"]
