"""Where the numbers of a run go: console, ``log.jsonl``, TensorBoard and, if asked for, Weights & Biases. Only rank 0 writes.

``log.jsonl`` is a line per event: ``{"event": "train", "step": 20, "loss": ...}``. A resumed run drops the lines beyond the step it
resumes from, so the file reads as if it had never stopped.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from ..common.files import replace_text
from ..common.terminal import for_stream
from .recipe import Recipe

NAME = "log.jsonl"


class Logs:
    def __init__(self, recipe: Recipe, directory: Path, *, start: int, active: bool, quiet: bool = False) -> None:
        self.active, self.quiet, self.steps = active, quiet, recipe.run.steps
        self.board: Any = None
        self.wandb: Any = None
        if not active:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / NAME
        drop_beyond(self.path, start)
        self.file = self.path.open("a", encoding="utf-8")
        if recipe.log.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(directory / "tensorboard"), purge_step=start + 1)
            except ImportError:
                self.say("tensorboard is not installed (pip install 'ladder-residual[train]'): no event files are written")
        if recipe.log.wandb:
            try:
                import wandb
            except ImportError:
                raise ValueError("log.wandb is set, but wandb is not installed: pip install wandb, or remove it") from None
            same = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]  # a resumed run goes on in its own curves
            settings = {"project": recipe.log.wandb, "name": recipe.name, "config": recipe.to_dict()}
            self.wandb = wandb.init(**settings, id=same, resume="allow")

    def event(self, kind: str, step: int, **values: Any) -> None:
        """``values`` are numbers or text; ``step`` counts finished steps."""
        if not self.active:
            return
        print(json.dumps({"event": kind, "step": step, **values}), file=self.file, flush=True)
        numbers = {f"{kind}/{key}": value for key, value in values.items() if isinstance(value, int | float)}
        if self.board is not None:
            for key, value in numbers.items():
                self.board.add_scalar(key, value, step)
            self.board.flush()
        if self.wandb is not None:
            self.wandb.log(numbers, step=step)
        if not self.quiet:
            self._show(kind, step, values)

    def has(self, kind: str, step: int) -> bool:
        return self.active and any((event.get("event"), event["step"]) == (kind, step) for event in read_log(self.path.parent))

    def _show(self, kind: str, step: int, values: dict[str, Any]) -> None:
        words = {
            "loss": "loss {:.4f}",
            "lr": "lr {:.2e}",
            "grad_norm": "norm {:.3f}",
            "tokens_per_s": "{:,.0f} tokens/s",
            "mfu": "MFU {:.1%}",
            "memory_gib": "{:.2f} GiB",
        }
        parts = [text.format(values[key]) for key, text in words.items() if values.get(key) is not None]
        self.say(f"step {step}/{self.steps}  {'' if kind == 'train' else kind + '  '}{'  '.join(parts)}")

    def say(self, text: str) -> None:
        """For people, on the error stream: the output stream belongs to results."""
        if not self.active or self.quiet:
            return
        from rich.console import Console

        text = for_stream(text, sys.stderr)
        Console(stderr=True, soft_wrap=True).print(text, highlight=sys.stderr.isatty(), markup=False)

    def close(self) -> None:
        if not self.active:
            return
        self.file.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


def read_log(directory: Path) -> list[dict[str, Any]]:
    """The events of a run, as far as they are whole."""
    return read_events(directory / NAME)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of a file as far as they are whole: a crash cuts the last one."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(event, dict) or not isinstance(event.get("step"), int):
            break
        events.append(event)
    return events


def drop_beyond(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [event for event in read_events(path) if event["step"] <= step] if step else []
    replace_text(path, "".join(json.dumps(event) + "\n" for event in kept))
