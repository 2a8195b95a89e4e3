"""A healing run as data: the options of ``ladder adapt`` and of a recipe file. No torch.

student = "smollm2-ladder"
teacher = "smollm2"
method = "distill"
tokens = 20_000_000
[[data]]
path = "books.txt.xz"
weight = 0.5
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

METHODS = ("distill", "sft", "lora")
PARALLEL = ("auto", "ddp", "fsdp")
PRECISIONS = ("auto", "bf16", "fp32")
SCHEDULES = ("cosine", "linear", "constant")
OPTIMIZERS = ("adamw", "muon")
TOO_LONG = ("error", "drop", "split")


@dataclass(frozen=True)
class Source:
    """One text to learn from: a file, a corpus directory of ``ladder data prepare``, or a hub dataset."""

    path: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"the weight of {self.path} must be positive, got {self.weight}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    student: str
    teacher: str | None = None
    out: str | None = None
    data: tuple[Source, ...] = ()
    heldout: tuple[str, ...] = ()  # texts to measure on, never trained on
    method: str = "distill"
    control: bool = False  # the unchanged model instead of the converted one, everything else alike

    # How much
    tokens: int | None = None
    epochs: float = 1.0
    sequence: int = 1024
    batch_tokens: int = 32_768  # per optimizer step, over all ranks and accumulation steps
    micro_rows: int | None = None  # rows at a time on one device; default: all that a step needs

    # How
    learning_rate: float = 3e-4
    schedule: str = "cosine"
    warmup: float = 0.02  # share of the steps, or their number if 1 or more
    final_rate: float = 0.0  # where the schedule ends, as a share of the learning rate
    optimizer: str = "adamw"
    other_rate: float = 1.0  # with muon: the rate of embedding, head and norms, as a share of the learning rate
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0

    # The loss
    temperature: float = 1.0
    top_k: int = 0
    data_weight: float = 0.0  # of the text's own next-token loss beside the teacher's distribution
    hidden_weight: float = 0.0  # of the distance between hidden states
    hidden_share: float = 1.0  # of the run during which hidden states are matched; the weight falls linearly to 0

    # Progressive conversion: wirings in order, switched at equal shares of `stages_share` of the run; the last is the student's own
    stages: tuple[str, ...] = ()
    stages_share: float = 0.5

    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_targets: tuple[str, ...] = ()  # default: every projection of the layers

    # Chats
    answers_only: bool = True  # next-token loss on answers only
    too_long: str = "error"  # chats longer than a row: error, drop or split

    # The machine
    parallel: str = "auto"
    precision: str = "auto"
    compile: bool = False
    graphs: bool = False  # record forward and backward in a CUDA graph: one GPU, no accumulation
    gradient_checkpointing: bool = False

    # Keeping
    save_every: int = 0  # steps between checkpoints; 0: only at the end
    keep: int = 2
    log_every: int = 10
    evaluate_every: int = 0  # steps between measurements on the held-out texts; 0: before and after
    evaluate_tokens: int = 65_536
    resume: bool = True
    progress: bool = True  # show a bar

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        _one_of("parallel", self.parallel, PARALLEL)
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("too_long", self.too_long, TOO_LONG)
        positive = (
            "sequence",
            "batch_tokens",
            "learning_rate",
            "lora_rank",
            "lora_alpha",
            "keep",
            "log_every",
            "evaluate_tokens",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in (
            "warmup",
            "final_rate",
            "other_rate",
            "weight_decay",
            "data_weight",
            "hidden_weight",
            "save_every",
            "evaluate_every",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("hidden_share", "stages_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share of the run: above 0 and at most 1, got {getattr(self, name)}")
        if self.stages and self.stages_share == 1:
            raise ValueError("stages_share=1 leaves no step for the last stage, the wiring asked for; use less than 1")
        if self.sequence < 2:
            raise ValueError(f"a row needs at least 2 tokens to predict one, got sequence={self.sequence}")
        if self.tokens is not None and self.tokens < self.sequence:
            raise ValueError(f"tokens={self.tokens} is less than one row of {self.sequence}")
        if self.batch_tokens % self.sequence:
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is no multiple of sequence={self.sequence}; "
                f"use {max(1, round(self.batch_tokens / self.sequence)) * self.sequence}"
            )
        if self.micro_rows is not None and (self.micro_rows < 1 or self.rows_per_step % self.micro_rows):
            raise ValueError(f"micro_rows={self.micro_rows} does not divide the {self.rows_per_step} rows of a step")
        trained_on = {Path(source.path).resolve() for source in self.data}
        for text in self.heldout:
            if Path(text).resolve() in trained_on:
                raise ValueError(
                    f"{text} is both trained on (data) and measured on (heldout): give a text the run does not learn"
                )
        if self.method == "distill" and self.teacher is None:
            raise ValueError("method distill learns from the original model: name it with teacher (--teacher SRC)")
        if self.control and self.teacher is None:
            raise ValueError("control trains the unchanged model: name it with teacher (--teacher SRC)")
        if self.control and self.method == "distill":
            raise ValueError("control with method distill would learn from itself, and nothing: use method sft (--method sft)")
        if self.keep < 2:
            raise ValueError(f"keep={self.keep} is one checkpoint, and the newest may hold weights that just diverged: keep 2")
        if self.optimizer == "muon" and (self.method == "lora" or self.parallel == "fsdp"):
            raise ValueError("optimizer muon works on whole matrices: not with lora or fsdp; use adamw")
        if self.control and self.stages:
            raise ValueError("control keeps the unchanged wiring: drop stages")

    @property
    def rows_per_step(self) -> int:
        return self.batch_tokens // self.sequence

    @property
    def rows(self) -> int | None:
        """Rows the run visits, in whole steps; None where ``epochs`` decides."""
        return None if self.tokens is None else max(1, round(self.tokens / self.batch_tokens)) * self.rows_per_step

    @property
    def evaluate_rows(self) -> int:
        return max(1, self.evaluate_tokens // self.sequence)

    @property
    def output(self) -> Path:
        """Where the healed checkpoint goes: never into the student, whose weights may be links to the teacher's files."""
        if self.out is not None:
            return Path(self.out)
        name = Path(self.student)
        return name.with_name(f"{name.name}-{'control' if self.control else 'healed'}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")


def read_recipe(path: Path, overrides: Mapping[str, Any] | None = None) -> Settings:
    """A recipe with ``overrides`` from the command line; unknown keys and wrong types are named."""
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no recipe at {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} is not a readable recipe: {error}") from error
    return from_mapping({**recipe, **(overrides or {})}, str(path))


def from_mapping(values: Mapping[str, Any], where: str) -> Settings:
    known = {entry.name: entry for entry in fields(Settings)}
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"{where}: unknown key {name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        chosen[name] = _converted(name, value, where)
    if "student" not in chosen:
        raise ValueError(f"{where}: student is missing: the converted checkpoint to heal")
    return Settings(**chosen)


_KINDS: dict[str, Any] = {"student": "", "teacher": "", "out": "", "tokens": 0, "micro_rows": 0}  # those whose default is None


def _converted(name: str, value: Any, where: str) -> Any:
    if name == "data":
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: data is a list of tables with path and weight, got {value!r:.80}")
        return tuple(_source(entry, where) for entry in value)
    entry = next(entry for entry in fields(Settings) if entry.name == name)
    example = _KINDS.get(name, entry.default)
    if isinstance(example, tuple):
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{where}: {name} is a list of strings, got {value!r:.80}")
        return tuple(value)
    kind = type(example)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is not type(value):
        raise ValueError(f"{where}: {name} must be of type {kind.__name__}, got {value!r:.80}")
    return value


def _source(entry: Any, where: str) -> Source:
    if isinstance(entry, Source):
        return entry
    if isinstance(entry, str):
        return Source(entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or set(entry) - {"path", "weight"}:
        raise ValueError(f"{where}: a data entry is a path, or a table with path and weight; got {entry!r:.120}")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"{where}: the weight of {entry['path']} must be a number, got {weight!r:.40}")
    return Source(entry["path"], float(weight))
