"""A recovery run as data: the options of ``ladder adapt`` and of a recipe file. No torch.

student = "smollm2-ladder"
teacher = "smollm2"
method = "distill"
tokens = 20_000_000
[[data]]
path = "books.txt.xz"
weight = 0.5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from ..common import recipe as recipes
from ..common.recipe import Range
from ..models.checkpoint_reader import read_json

Method = Literal["distill", "sft", "lora"]
Parallel = Literal["auto", "ddp", "fsdp"]
Precision = Literal["auto", "bf16", "fp32"]
Schedule = Literal["cosine", "linear", "constant"]
Optimizer = Literal["adamw", "muon"]
TooLong = Literal["error", "drop", "split"]
Positive = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
AboveZero = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(above=0, high=1)]


def check_installed() -> None:
    if find_spec("accelerate") is None:
        raise ValueError("recovery training needs the accelerate package: pip install 'ladder-residual[train]'")


def choices(kind: Any) -> str:
    """The values of a ``Literal``, for help texts."""
    return ", ".join(get_args(kind))


@dataclass(frozen=True)
class DataSource:
    """One text to learn from: a file, a corpus directory of ``ladder data prepare``, or a hub dataset."""

    path: str
    weight: AboveZero = 1.0


@dataclass(frozen=True, kw_only=True)
class AdaptSettings:
    student: str
    teacher: str | None = None
    out: str | None = None
    data: tuple[DataSource, ...] = ()
    heldout: tuple[str, ...] = ()  # texts to measure on, never trained on
    holdout: Annotated[float, Range(0, high=0.5)] = 0.05  # without heldout: share of the data's rows to measure on; 0: none
    method: Method = "distill"
    control: bool = False  # the unchanged model instead of the converted one, everything else alike

    # How much
    tokens: Annotated[int | None, Range(1)] = None
    epochs: AboveZero = 1.0
    sequence: Annotated[int, Range(2)] = 1024
    batch_tokens: Positive = 32_768  # per optimizer step, over all ranks and accumulation steps
    micro_rows: Annotated[int | None, Range(1)] = None  # rows at a time on one device; default: all that a step needs

    # How
    learning_rate: AboveZero = 3e-4
    schedule: Schedule = "cosine"
    warmup: NotNegative = 0.02  # share of the steps, or their number if 1 or more
    final_rate: NotNegative = 0.0  # where the schedule ends, as a share of the learning rate
    optimizer: Optimizer = "adamw"
    other_rate: NotNegative = 1.0  # with muon: the rate of embedding, head and norms, as a share of the learning rate
    weight_decay: NotNegative = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0

    # The loss
    temperature: float = 1.0
    top_k: int = 0
    data_weight: NotNegative = 0.0  # of the text's own next-token loss beside the teacher's distribution
    hidden_weight: NotNegative = 0.0  # of the distance between hidden states
    hidden_share: Share = 1.0  # of the run during which hidden states are matched; the weight falls linearly to 0

    # Progressive conversion: wirings in order, switched at equal shares of `stages_share` of the run; the last is the student's own
    stages: tuple[str, ...] = ()
    stages_share: Share = 0.5

    # Or all converted layers together, gradually over a share of the run; 0: ladder from the start
    anneal: Annotated[float, Range(0, high=0.5)] = 0.0
    anneal_kl: AboveZero = 1.0  # KL to the teacher above which it pauses (anneal.py)

    lora_rank: Positive = 16
    lora_alpha: AboveZero = 32.0
    lora_targets: tuple[str, ...] = ()  # default: every projection of the layers
    merge: bool = True  # into plain weights; False, and always with quantised ones: the adapter alone, in peft's format

    # Chats
    answers_only: bool = True  # next-token loss on answers only
    too_long: TooLong = "error"  # chats longer than a row: error, drop or split

    # The machine
    parallel: Parallel = "auto"
    precision: Precision = "auto"
    compile: bool = False
    graphs: bool = False  # record forward and backward in a CUDA graph: one GPU, no accumulation
    gradient_checkpointing: bool = False

    # Keeping
    save_every: Count = 0  # steps between checkpoints; 0: only at the end
    keep: Positive = 2
    log_every: Positive = 10
    evaluate_every: Count = 0  # steps between measurements on the held-out texts; 0: before and after
    evaluate_tokens: Positive = 65_536
    resume: bool = True
    progress: bool = True  # show a bar

    def __post_init__(self) -> None:
        recipes.check(self)
        if self.stages and self.stages_share == 1:
            raise ValueError("stages_share=1 leaves no step for the last stage, the wiring asked for; use less than 1")
        if self.tokens is not None and self.tokens < self.sequence:
            raise ValueError(f"tokens={self.tokens} is less than one row of {self.sequence}")
        if self.batch_tokens % self.sequence:
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is no multiple of sequence={self.sequence}; "
                f"use {max(1, round(self.batch_tokens / self.sequence)) * self.sequence}"
            )
        if self.micro_rows is not None and self.rows_per_step % self.micro_rows:
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
        if not self.merge and self.method != "lora":
            raise ValueError(f"merge = false keeps an adapter, and method {self.method} makes none: use method lora")
        if self.control and (self.stages or self.anneal):
            raise ValueError(f"control keeps the unchanged wiring: drop {'stages' if self.stages else 'anneal'}")
        if self.stages and self.anneal:
            raise ValueError("stages and anneal are two ways to the student's wiring: give one")

    @property
    def trained(self) -> str:
        """The checkpoint that is trained."""
        return self.teacher if self.control and self.teacher is not None else self.student

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
        """Where the recovered checkpoint goes: never into the student, whose weights may be links to the teacher's files."""
        if self.out is not None:
            return Path(self.out)
        name = Path(self.student)
        if name.name in ("", ".."):
            name = name.resolve()  # of the working directory, say
        if not name.name:
            raise ValueError(f"student {self.student!r} has no name to make one for the result of: give it one with --out")
        return name.with_name(f"{name.name}-{'control' if self.control else 'recovered'}")


def read_recipe(path: Path, overrides: Mapping[str, Any] | None = None) -> AdaptSettings:
    """A recipe with ``overrides`` from the command line."""
    return from_mapping({**recipes.read(path), **(overrides or {})}, str(path))


def from_mapping(values: Mapping[str, Any], where: str) -> AdaptSettings:
    """``data`` may hold paths beside tables: a path alone has the weight 1. Rows are no longer than the student's context."""
    if "sequence" not in values and (context := _context(values.get("student"))):
        values = {**values, "sequence": min(context, AdaptSettings.sequence)}
    data = values.get("data")
    if isinstance(data, list | tuple):
        values = {**values, "data": [{"path": source} if isinstance(source, str) else source for source in data]}
    return recipes.build(AdaptSettings, values, where)


def _context(student: Any) -> int | None:
    """Of a student on disk, if its config is in order; one that is not is refused later, by name."""
    try:
        context = read_json(Path(str(student)) / "config.json").get("max_position_embeddings")
    except ValueError:
        return None
    return context if isinstance(context, int) else None
