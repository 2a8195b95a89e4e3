"""A training run as a file: ``recipe.toml`` -> frozen dataclasses, checked before anything is started. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from ..common import recipe as recipes
from ..common.recipe import Range
from ..core.config import Wiring
from ..models.families import FAMILIES, check_wiring
from ..models.presets import ModelShape

PATHS = ("data.train", "data.valid")  # relative to the recipe that names them
Positive = Annotated[int, Range(1)]
PositiveOrDefault = Annotated[int | None, Range(1)]
Count = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
Beta = Annotated[float, Range(0, below=1)]


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
            published = ModelShape.from_name(self.preset)
            published.require_dense("model.preset")
            shape = published.to_dict()
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
    sequence: Annotated[int, Range(2)] = 2048
    seed: int | None = None  # of the order of rows; default: the run's seed
    document_attention: bool = False  # attention stays inside documents
    verify: Literal["sizes", "checksums"] = "checksums"  # of the shards, before the first step; one rank reads for all


@dataclass(frozen=True, kw_only=True)
class Batch:
    rows: Positive = 8  # of a step, over all ranks
    micro_rows: PositiveOrDefault = None  # of one forward on one rank; default: all of a rank's rows at once


@dataclass(frozen=True, kw_only=True)
class Parallel:
    tp: Positive = 1
    dp: PositiveOrDefault = None  # default: all ranks / tp
    emulate_ranks: Positive = 1  # compute rank-dependent wirings (desync, delayed) as so many ranks would, in every process
    reducer: Literal["async", "blocking"] = "async"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: Annotated[float, Range(0, 10)] = 3e-4
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Share = 1e-10
    weight_decay: Annotated[float, Range(0, 10)] = 0.1
    decay_norms_and_embeddings: bool = True  # the paper decays everything
    clip: Annotated[float, Range(0)] = 1.0  # 0: never
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: Count = 0
    final_lr: Share = 0.1  # share of lr at the end
    decay: Share = 0.2  # wsd: the last share of the steps


@dataclass(frozen=True, kw_only=True)
class Run:
    steps: Positive = 100
    seed: Count = 0
    precision: Literal["bf16", "fp32"] = "bf16"  # bf16: weights, moments and gradient reduction stay float32
    compile: bool = False
    checkpoint_activations: bool = False
    z_loss: Annotated[float, Range(0)] = 0.0
    loss_chunk: Positive = 4096
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    every: Count = 0  # steps; 0: only at the end
    rows: PositiveOrDefault = None  # of the validation corpus; default: all of them, once
    first: bool = False  # before the first step, too


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    directory: str = ""  # default: runs/NAME beside the current directory
    enabled: bool = True  # false: nothing is saved, also not at the end (experiments that only want the losses)
    every: Count = 0  # steps; 0: only at the end
    keep: Positive = 2
    blocking: bool = False  # wait for each checkpoint to be on disk
    export: bool = True  # write a Hugging Face directory when training is done


@dataclass(frozen=True, kw_only=True)
class Log:
    every: Positive = 10
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
        recipes.check(self)
        recipes.one_of("model.family", self.model.family, FAMILIES)
        if self.optimizer.warmup > self.run.steps:
            raise ValueError(f"optimizer.warmup is {self.optimizer.warmup} steps, but the run has only {self.run.steps}")
        wiring, ranks = self.wiring, self.parallel.emulate_ranks
        check_wiring(FAMILIES[self.model.shape().family], wiring)
        if wiring.kind == "no-comm":
            raise ValueError(
                "model.wiring no-comm computes wrong results on purpose (a bound for measurements): it cannot be trained"
            )
        if ranks > 1 and self.parallel.tp > 1:
            raise ValueError(
                f"parallel.emulate_ranks is {ranks}: it stands in for real ranks, so parallel.tp must be 1, got {self.parallel.tp}"
            )
        wiring.check_tp(ranks if ranks > 1 else self.parallel.tp)

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
        return recipes.build(cls, document, where)

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """Read a recipe with its bases; ``overrides`` are ``a.b=value``, value as in TOML (a bare word is a string)."""
        document = recipes.read(path, PATHS)
        for text in overrides:
            recipes.override(document, text)
        document.setdefault("name", Path(path).stem)
        return cls.from_dict(document, str(path))
