"""What docs/serving.md tells a reader to type, so that tests type it."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
HUB_ID = "meta-llama/Llama-3.1-8B-Instruct"


def section(heading: str) -> str:
    text = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    assert text, f"docs/serving.md has no section {heading!r}"
    return text


def commands(heading: str) -> list[str]:
    """The commands below a heading, without their comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", section(heading), re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines()]
    return [re.sub(r"\s+#.*$", "", line) for line in lines if line.strip()]


def words(command: str, **replaced: str) -> list[str]:
    """Words of a command, with what stands for the reader's own values replaced."""
    return [replaced.get(word, word) for word in shlex.split(command)]


def overrides() -> dict[str, Any]:
    """What the page tells to pass with --hf-overrides."""
    (command,) = [command for command in commands("From a hub id to a served ladder model") if "--hf-overrides" in command]
    parts = words(command)
    return json.loads(parts[parts.index("--hf-overrides") + 1])


def with_programs(environment: dict[str, str]) -> dict[str, str]:
    """The environment in which ``ladder`` and ``vllm`` are those of this Python."""
    return environment | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"}
