"""The runs that faults are injected into, and how one sees what they have achieved."""

from __future__ import annotations

import json
import shutil
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
    more: tuple[str, ...] = ()  # options of every run
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
        return [*words, *(["--tp", str(ranks)] if ranks else []), *self.more, *extra]

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


@dataclass
class TrainJob:
    """``ladder train`` of a tiny model, with a checkpoint every few steps: ``dp`` copies of it, each cut over ``tp`` ranks."""

    directory: Path
    steps: int = 40
    every: int = 5
    tp: int = 2
    dp: int = 1
    timeout: float = 10.0
    device: str = "cpu"
    precision: str = "fp32"
    compiled: bool = False
    reference: dict[int, float] = field(default_factory=dict)  # losses of an undisturbed run, by step

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def run(self) -> Path:
        return self.directory / "run"

    @property
    def recipe(self) -> Path:
        return self.directory / "recipe.toml"

    def prepare(self) -> None:
        """A recipe and its corpus, and no run yet."""
        self.directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.run, ignore_errors=True)
        corpus = self.directory / "corpus"
        if not corpus.exists():
            from lab.corpora import write_corpus

            documents = [[1 + (7 * number + 3 * place) % 400 for place in range(60)] for number in range(100)]
            write_corpus(corpus, documents, vocab_size=512, end_of_document=0)
        self.recipe.write_text(
            f"""
[model]
hidden_size = 64
intermediate_size = 160
num_layers = 4
num_heads = 4
vocab_size = 512
wiring = "ladder"
[data]
train = "corpus"
sequence = 32
[batch]
rows = 8
[parallel]
tp = {self.tp}
dp = {self.dp}
[optimizer]
lr = 1e-2
warmup = 2
[run]
steps = {self.steps}
precision = "{self.precision}"
device = "{self.device}"
compile = {str(self.compiled).lower()}
timeout = {self.timeout}
[checkpoint]
directory = "{self.run}"
every = {self.every}
export = false
[log]
every = 1
tensorboard = false
"""
        )

    def arguments(self, *, by_torchrun: bool = False, extra: Sequence[str] = ()) -> list[str]:
        """After ``ladder``; torchrun starts the ranks itself."""
        share = ["--share-gpu"] if self.device == "cuda" else []
        return ["train", str(self.recipe), *([] if by_torchrun else ["--ranks", str(self.ranks)]), *share, *extra]

    def losses(self) -> dict[int, float]:
        """By step, of what the log holds now; a line that is just being written is left out."""
        path = self.run / "log.jsonl"
        content = path.read_text(encoding="utf-8") if path.exists() else ""
        events = [json.loads(line) for line in content.split("\n")[:-1]]
        return {event["step"]: event["loss"] for event in events if event["event"] == "train"}

    def begun(self) -> bool:
        return len(self.losses()) > 0

    def wrong_losses(self, whole: bool) -> str | None:
        """What is wrong with the losses logged so far; ``whole``: all steps must be there."""
        losses = self.losses()
        if not whole and not self.reference:
            return None  # nobody ran it undisturbed
        if whole and sorted(losses) != sorted(self.reference):
            return f"steps {sorted(losses)[:1]} to {sorted(losses)[-1:]} were logged, expected 1 to {self.steps}"
        worst = max((abs(loss / self.reference[step] - 1) for step, loss in losses.items()), default=0.0)
        return f"a loss differs by {worst:.1e} from the undisturbed run's" if worst > 1e-6 else None

    def unfinished_checkpoints(self) -> list[str]:
        """Names under the run's checkpoints that a reader could take for one and that are not complete."""
        from ladder_residual.train.manifest import check_files

        folder = self.run / "checkpoints"
        found = [path for path in folder.iterdir() if path.suffix != ".tmp"] if folder.is_dir() else []
        return [f"{path.name}: {problem}" for path in found if (problem := check_files(path))]

    def unfinished_saves(self) -> list[str]:
        """What a rank that dies while it saves leaves: directories no reader takes for a checkpoint. The next start removes them."""
        return sorted(path.name for path in (self.run / "checkpoints").glob("*.tmp"))
