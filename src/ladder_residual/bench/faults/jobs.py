"""The runs that faults are injected into, and how one sees what they have achieved."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

LADDER = [sys.executable, "-m", "ladder_residual"]


@dataclass
class GenerateJob:
    """``ladder generate`` over a file of prompts, one line of output each."""

    directory: Path
    source: str
    prompts: int = 40
    new_tokens: int = 60
    timeout: float = 10.0
    reference: list[str] = field(default_factory=list)  # the lines of an undisturbed run

    @property
    def output(self) -> Path:
        return self.directory / "out.jsonl"

    def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        starts = ("Once upon a time", "One day, a little dog", "There was a big tree", "Tim and Sue went")
        lines = [starts[index % len(starts)] for index in range(self.prompts)]
        (self.directory / "prompts.txt").write_text("\n".join(lines) + "\n")
        self.output.unlink(missing_ok=True)

    def arguments(self, ranks: int | None = 2, extra: Sequence[str] = ()) -> list[str]:
        """After ``ladder``; without ``ranks`` for a launcher of one's own."""
        words = ["generate", self.source, "--file", str(self.directory / "prompts.txt"), "--out", str(self.output)]
        words += ["-n", str(self.new_tokens), "--temperature", "0", "--batch-size", "1", "--timeout", str(self.timeout)]
        return [*words, *(["--tp", str(ranks)] if ranks else []), *extra]

    def begun(self) -> bool:
        return self.output.exists() and b"\n" in self.output.read_bytes()

    def lines(self) -> list[str]:
        return self.output.read_text(encoding="utf-8").splitlines() if self.output.exists() else []

    def wrong_output(self) -> str | None:
        """What is wrong with what was written so far; a prefix of the undisturbed run's lines, each whole, is right."""
        if not self.output.exists():
            return None
        content = self.output.read_text(encoding="utf-8")
        if content and not content.endswith("\n"):
            return "the last line is cut"
        for number, (line, expected) in enumerate(zip(content.splitlines(), self.reference, strict=False)):
            if json.loads(line) != json.loads(expected):
                return f"line {number + 1} differs from the undisturbed run's"
        return None
