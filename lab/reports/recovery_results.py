"""The results of recovery as the tables read them: runs by name, gaps and how much of them closed, controls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXTS = {"books_heldout": "books", "wikitext2": "WikiText-2", "samples_heldout": "own samples"}
# Converted layers: how much of the gap was to be closed on held-out books and on WikiText-2.
TARGETS = {15: (99, 95), 20: (98, 95), 30: (97, 90)}
FINE_TUNED = ", fine-tuned teacher"
OWN = ", own samples"


class Results:
    """All runs by name, the original's losses, the selection, the tasks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.document = _read(folder / "recovery.json")
        self.runs: dict[str, Any] = {run["name"]: run for run in self.document["runs"] if not run["problem"]}
        self.original = {text: values["loss"] for text, values in self.document["original"].items()}
        self.selection = self.document.get("selection")
        self.second_selection = _read(folder / "selection.json")  # of stories15M
        self.tasks = _read(folder / "tasks.json")
        self.pairs = _read(folder / "pairs.json")  # distillation beside next-token training, and its tasks
        self.pair_tasks = _read(folder / "pairs-tasks.json")
        self.refits = [_read(path) for path in sorted(folder.glob("refit*.json"))]
        self.stories = _read(folder / "stories15m.json")
        controls = [run for name, run in self.runs.items() if name.startswith("control")]
        # the short one at the rate that suits an unchanged model; it is also the fine-tuned teacher
        self.control = min(controls, key=lambda run: (run["tokens"], run["settings"]["learning_rate"]))

    def original_along(self, text: str) -> float:
        """The original on the rows that are measured during a run: what its control began with."""
        return self.control["curve"][0]["texts"][text]["loss"]

    def losses(self, run: dict[str, Any], text: str) -> tuple[float, float, float]:
        """Original, zero-shot and recovered, all on the same rows."""
        rows = {run[when][text]["tokens"] for when in ("before", "after")} | {self.document["original"][text]["tokens"]}
        if len(rows) == 1:
            return self.original[text], run["before"][text]["loss"], run["after"][text]["loss"]
        measured = run["before"][text]["tokens"]
        recovered = run["after"] if run["after"][text]["tokens"] == measured else run["curve"][-1]["texts"]
        return self.original_along(text), run["before"][text]["loss"], recovered[text]["loss"]

    def closed(self, run: dict[str, Any], text: str) -> float:
        """Per cent of the gap between zero-shot conversion and the original."""
        original, before, after = self.losses(run, text)
        return 100 * (before - after) / (before - original)

    def closed_to_control(self, run: dict[str, Any], text: str, control: dict[str, Any] | None = None) -> float | None:
        """The same up to a control (default: the short one), the unchanged model trained on the same text. None where rows differ."""
        _, before, after = self.losses(run, text)
        control = control or self.control
        if control["after"][text]["tokens"] != run["before"][text]["tokens"]:
            return None
        return 100 * (before - after) / (before - control["after"][text]["loss"])

    def control_like(self, run: dict[str, Any]) -> dict[str, Any] | None:
        """The control of a next-token run: the unchanged model after as many tokens with the same optimizer and rate."""
        if run["wiring"] == "standard" or run["settings"]["method"] != "sft":
            return None
        same = ("method", "optimizer", "learning_rate", "tokens")
        alike = (
            other
            for other in self.runs.values()
            if other["wiring"] == "standard" and all(other["settings"][key] == run["settings"][key] for key in same)
        )
        return next(alike, None)

    def target_runs(self, layers: int) -> list[dict[str, Any]]:
        """The long runs that convert so many layers, best recipe first."""
        names = [f"distill {layers}{which}{teacher}" for teacher in (FINE_TUNED, "") for which in ("", " chosen")]
        names.append(f"distill {layers} chosen{OWN}")
        return [self.runs[name] for name in names if name in self.runs]

    def zero_shot_along(self, run: dict[str, Any], text: str) -> float:
        """Zero-shot on the rows measured during a run. A student of the fine-tuned teacher begins better."""
        like = (other for other in self.runs.values() if other["wiring"] == run["wiring"])
        return next(other["curve"][0]["texts"][text]["loss"] for other in like if not other.get("fine_tuned_teacher_tokens"))


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def recipe(run: dict[str, Any]) -> str:
    """Optimizer and rate, weight of hidden states, weight of the text's own loss."""
    settings = run["settings"]
    how = f"{settings['optimizer']} {settings['learning_rate']:g}"
    how += f", hidden {settings['hidden_weight']:g}" if settings["hidden_weight"] else ""
    return how + (f", text {settings['data_weight']:g}" if settings["data_weight"] else "")
