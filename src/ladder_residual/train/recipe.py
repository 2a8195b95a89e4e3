"""A run as a file: ``recipe.toml`` -> frozen dataclasses, checked before anything is started. No torch.

    base = "1b-standard.toml"    # everything of that recipe, except what stands here
    [model]
    wiring = "ladder"

Unknown keys are named with the nearest known one, values of the wrong kind with what was expected.
"""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from ..config import Wiring
from ..families import FAMILIES, check_wiring
from ..presets import ModelShape

MAX_BASES = 8


@dataclass(frozen=True, kw_only=True)
class Model:
    """``preset`` names a published shape; every other size replaces that of the preset."""

    preset: str | None = None
    wiring: str = "standard"
    family: str = "llama"
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    tied_embeddings: bool | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    attention: str = "sdpa"
    options: Mapping[str, Any] = field(default_factory=dict)  # any other field of the family's Hugging Face config

    def shape(self) -> ModelShape:
        given = {f.name: getattr(self, f.name) for f in fields(ModelShape) if f.name in {own.name for own in fields(self)}}
        given = {name: value for name, value in given.items() if value is not None}
        if self.preset is not None:
            shape = ModelShape.from_name(self.preset).to_dict()
            if "head_dim" not in given and {"hidden_size", "num_heads"} & given.keys():
                shape.pop("head_dim")
            given = shape | given | {"family": shape["family"] if self.family == "llama" else self.family}
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "vocab_size"):
            if name not in given:
                raise ValueError(f"model.{name} is missing; give it, or model.preset")
        given.setdefault("num_kv_heads", given["num_heads"])
        if "head_dim" not in given:
            if given["hidden_size"] % given["num_heads"]:
                raise ValueError(
                    f"model.hidden_size {given['hidden_size']} is no multiple of model.num_heads {given['num_heads']}: "
                    "give model.head_dim"
                )
            given["head_dim"] = given["hidden_size"] // given["num_heads"]
        return ModelShape(**given)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Directories written by ``ladder data prepare``, relative to the recipe unless absolute."""

    train: str = ""
    valid: str | None = None
    sequence: int = 2048
    seed: int | None = None  # of the order of rows; default: the run's seed
    document_attention: bool = False  # attention stays inside documents
    verify: str = "checksums"  # of the shards, before the first step: one rank reads them all; or only their sizes


@dataclass(frozen=True, kw_only=True)
class Batch:
    rows: int = 8  # of a step, over all ranks
    micro_rows: int | None = None  # of one forward on one rank; default: all of a rank's rows at once


@dataclass(frozen=True, kw_only=True)
class Parallel:
    tp: int = 1
    dp: int | None = None  # default: all ranks / tp
    emulate_ranks: int = 1  # compute rank-dependent wirings (desync, delayed) as so many ranks would, in every process
    reducer: str = "async"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10
    weight_decay: float = 0.1
    decay_norms_and_embeddings: bool = True  # the paper decays everything
    clip: float = 1.0  # 0: never
    schedule: str = "cosine"  # cosine, wsd or constant
    warmup: int = 0
    final_lr: float = 0.1  # share of lr at the end
    decay: float = 0.2  # wsd: the last share of the steps


@dataclass(frozen=True, kw_only=True)
class Run:
    steps: int = 100
    seed: int = 0
    precision: str = "bf16"  # bf16 (float32 weights, moments and sums of gradients) or fp32
    compile: bool = False
    checkpoint_activations: bool = False
    z_loss: float = 0.0
    loss_chunk: int = 4096
    device: str = "auto"
    timeout: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    every: int = 0  # steps; 0: only at the end
    rows: int | None = None  # of the validation corpus; default: all of them, once
    first: bool = False  # before the first step, too


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    directory: str = ""  # default: runs/NAME beside the current directory
    enabled: bool = True  # false: nothing is saved, also not at the end (experiments that only want the losses)
    every: int = 0  # steps; 0: only at the end
    keep: int = 2
    blocking: bool = False  # wait for each checkpoint to be on disk
    export: bool = True  # write a Hugging Face directory when training is done


@dataclass(frozen=True, kw_only=True)
class Log:
    every: int = 10
    tensorboard: bool = True
    wandb: str | None = None  # project
    peak_tflops: float | None = None  # of one device, for the MFU; default: by the device's name


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str = "run"
    model: Model
    data: Data = Data()
    batch: Batch = Batch()
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    run: Run = Run()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def wiring(self) -> Wiring:
        return Wiring.parse(self.model.wiring, self.model.shape().num_layers)

    @property
    def directory(self) -> Path:
        return Path(self.checkpoint.directory or f"runs/{self.name}")

    @property
    def tokens_per_step(self) -> int:
        return self.batch.rows * self.data.sequence

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], where: str = "recipe") -> Recipe:
        return _build(cls, document, where, "")

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """Read a recipe with its bases; ``overrides`` are ``a.b=value``, value as in TOML (a bare word is a string)."""
        document = _read(Path(path), depth=0)
        for text in overrides:
            _override(document, text)
        document.setdefault("name", Path(path).stem)
        return cls.from_dict(document, str(path))


def _read(path: Path, depth: int) -> dict[str, Any]:
    if depth > MAX_BASES:
        raise ValueError(f"{path}: recipes name each other as base in a circle, or more than {MAX_BASES} deep")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no recipe {path}") from None
    except (OSError, ValueError, RecursionError) as error:  # no file, no UTF-8, no TOML, a number of 5,000 digits, ...
        raise ValueError(f"cannot read the recipe {path}: {error}") from error
    data = document.get("data")
    for key in ("train", "valid") if isinstance(data, dict) else ():
        if isinstance(data, dict) and isinstance(data.get(key), str) and data[key]:
            data[key] = str(path.parent / data[key])  # an absolute one stays as it is
    base = document.pop("base", None)
    if base is None:
        return document
    if not isinstance(base, str):
        raise ValueError(f"{path}: base must be the path of another recipe, got {base!r:.60}")
    below = _read(path.parent / base, depth + 1)
    below.pop("name", None)  # a recipe built on another is called as its own file is
    return _merged(below, document)


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        mine = result.get(key)
        result[key] = _merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return result


def _override(document: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        raise ValueError(f"--set takes a.b=value, such as run.steps=20; got {text!r:.80}")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value.strip()
    for key in keys[:-1]:
        document = document.setdefault(key, {})
        if not isinstance(document, dict):
            raise ValueError(f"--set {text!r:.80}: {key} is no table")
    document[keys[-1]] = parsed


def _build(kind: Any, document: Mapping[str, Any], where: str, prefix: str) -> Any:
    if not isinstance(document, Mapping):
        raise ValueError(f"{where}: {prefix.rstrip('.')} must be a table, got {document!r:.60}")
    hints = typing.get_type_hints(kind)
    for key in document:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f"did you mean {prefix}{near[0]}? " if near else ""
            raise ValueError(f"{where}: unknown key {prefix}{key}; {hint}known here: {', '.join(hints)}")
    values = {}
    for key, hint in hints.items():
        if key not in document:
            continue
        value = document[key]
        values[key] = (
            _build(hint, value, where, f"{prefix}{key}.") if is_dataclass(hint) else _typed(value, hint, where, prefix + key)
        )
    if kind is Recipe and "model" not in values:
        raise ValueError(f"{where} has no [model]")
    return kind(**values)


def _typed(value: Any, hint: Any, where: str, name: str) -> Any:
    """``value`` as the annotation wants it; ValueError naming the key otherwise."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option is type(None) and value is None:
            return None
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option in (int, str, bool) and type(value) is option:
            return value
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            parts = typing.get_args(option)
            if len(parts) == len(value):
                return tuple(_typed(item, part, where, name) for item, part in zip(value, parts, strict=True))
        if typing.get_origin(option) is not None and typing.get_origin(option) is not tuple and isinstance(value, Mapping):
            return dict(value)
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    wanted = " or ".join(words.get(option, "two numbers") for option in options if option is not type(None))
    raise ValueError(f"{where}: {name} must be {wanted}, got {value!r:.60}")


def _check(recipe: Recipe) -> None:
    """What no single type can say."""
    least = {
        "data.sequence": 2,
        "batch.rows": 1,
        "batch.micro_rows": 1,
        "parallel.tp": 1,
        "parallel.dp": 1,
        "parallel.emulate_ranks": 1,
        "optimizer.warmup": 0,
        "run.steps": 1,
        "run.seed": 0,
        "run.loss_chunk": 1,
        "evaluate.every": 0,
        "evaluate.rows": 1,
        "checkpoint.every": 0,
        "checkpoint.keep": 1,
        "log.every": 1,
    }
    for name, smallest in least.items():
        table, key = name.split(".")
        value = getattr(getattr(recipe, table), key)
        if value is not None and value < smallest:
            raise ValueError(f"{name} must be at least {smallest}, got {value}")
    optimizer = recipe.optimizer
    for name, low, high in (
        ("lr", 0, 10),
        ("eps", 0, 1),
        ("weight_decay", 0, 10),
        ("clip", 0, 1e9),
        ("final_lr", 0, 1),
        ("decay", 0, 1),
    ):
        if not low <= getattr(optimizer, name) <= high:
            raise ValueError(f"optimizer.{name} must be between {low} and {high:g}, got {getattr(optimizer, name)}")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ValueError(f"optimizer.betas must lie in [0, 1), got {list(optimizer.betas)}")
    if recipe.run.z_loss < 0:
        raise ValueError(f"run.z_loss must not be negative, got {recipe.run.z_loss}")
    choices = {
        "optimizer.schedule": ("cosine", "wsd", "constant"),
        "run.precision": ("bf16", "fp32"),
        "data.verify": ("sizes", "checksums"),
        "run.device": ("auto", "cpu", "cuda"),
        "parallel.reducer": ("async", "blocking"),
        "model.family": tuple(FAMILIES),
    }
    for name, known in choices.items():
        table, key = name.split(".")
        value = getattr(getattr(recipe, table), key)
        if value not in known:
            near = difflib.get_close_matches(value, known, n=1)
            raise ValueError(
                f"{name} is {value!r}{f' (did you mean {near[0]!r}?)' if near else ''}; choose from {', '.join(known)}"
            )
    if optimizer.warmup > recipe.run.steps:
        raise ValueError(f"optimizer.warmup is {optimizer.warmup} steps, but the run has only {recipe.run.steps}")
    wiring, ranks = recipe.wiring, recipe.parallel.emulate_ranks
    check_wiring(FAMILIES[recipe.model.shape().family], wiring)
    if wiring.kind == "no-comm":
        raise ValueError(
            "model.wiring no-comm computes wrong results on purpose (a bound for measurements): it cannot be trained"
        )
    if ranks > 1 and recipe.parallel.tp > 1:
        raise ValueError(
            f"parallel.emulate_ranks is {ranks}: it stands in for real ranks, so parallel.tp must be 1, got {recipe.parallel.tp}"
        )
    wiring.check_tp(ranks if ranks > 1 else recipe.parallel.tp)
