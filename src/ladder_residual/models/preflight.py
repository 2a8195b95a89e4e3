"""What a checkpoint's files and its ``config.json`` can refuse. Loading begins with this, and commands call it before they import
torch or start a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..common.suggest import did_you_mean
from ..core.config import CONFIG_KEY, Wiring
from .adapter import ADAPTER_CONFIG, AdapterSource, is_adapter
from .checkpoint_reader import HEADS, Checkpoint, resolve
from .families import Family, check_wiring, family_of
from .presets import ModelShape
from .quantization.checkpoint import QuantizedCheckpoint, open_checkpoint
from .quantization.spec import QuantSpec
from .sharding import check_divides, shard_of

DTYPES = {  # as users write them: as torch calls them
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_STORED = {"BF16": "bfloat16", "F16": "float16"}
_NOT_OF_THE_MODEL = ("model_type", "auto_map", "quantization_config")  # quantised weights are read as plain ones
# Without one of these in config.json the family's own default holds, which only transformers knows.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


@dataclass(frozen=True)
class CheckedSource:
    """A checkpoint whose config, wiring and file headers are in order."""

    checkpoint: Checkpoint
    family: Family
    wiring: Wiring
    fields: dict[str, Any]  # of the model: config.json's, with the wiring that was asked for
    adapter: AdapterSource | None = None  # that the source is; the checkpoint is then its base

    @property
    def shape(self) -> ModelShape | None:
        """None if ``config.json`` leaves sizes, or whether a stored head counts, to the family's defaults."""
        head = any(name.endswith(HEADS) for name in self.checkpoint.names)
        if any(self.fields.get(name) is None for name in (*_SIZES, *(["tie_word_embeddings"] if head else []))):
            return None
        return ModelShape.from_hf({**self.fields, "model_type": self.family.model_type})

    @property
    def quantization(self) -> QuantSpec | None:
        return self.checkpoint.spec if isinstance(self.checkpoint, QuantizedCheckpoint) else None

    @property
    def dtype(self) -> str:
        """As the config says, or else as the weights are."""
        said = self.fields.get("dtype") or self.fields.get("torch_dtype")
        name = str(said).removeprefix("torch.")
        return name if name in BYTES else _STORED.get(self.checkpoint.dtype(), "float32")

    def stored_weights(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """What the files hold of the model and its shapes, without what is computed or tied to another."""
        checkpoint = self.checkpoint
        return {
            name: checkpoint.shape(name)
            for name in checkpoint.names
            if not checkpoint.is_computed(name) or (name.endswith(HEADS) and not shape.tied_embeddings)
        }

    def rank_bytes(self, shape: ModelShape, tp: int, rank: int, itemsize: int) -> tuple[int, int]:
        """Of the weights of one of ``tp`` ranks: as they are stored (plain ones in numbers of ``itemsize`` bytes), and as they are
        loaded, all in numbers of ``itemsize`` bytes."""
        stored = loaded = 0
        for name, whole in self.stored_weights(shape).items():
            spec = shard_of(name, whole, shape, tp, rank)
            stored += self.checkpoint.stored_bytes(name, spec, itemsize)
            loaded += itemsize * prod(spec.local_shape(whole) if spec else whole)
        return stored, loaded


def check_source(
    source: str | Path,
    *,
    tp: int | None = None,
    wiring: str | None = None,
    dtype: str = "auto",
    uneven: bool = False,
    copies: bool = False,
    allow_nonfinite: bool = False,
) -> CheckedSource:
    """Open ``source`` (directory or hub id), for ``tp`` ranks if they are known; ``wiring`` overrides its own. ValueError with the fix
    if that cannot work."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}{did_you_mean(dtype, DTYPES)}; choose auto, {', '.join(DTYPES)}")
    directory, adapter = resolve(source), None
    if is_adapter(directory):
        adapter = AdapterSource(directory)
        directory = adapter.base()
    if (directory / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{directory} holds {ADAPTER_CONFIG} beside config.json, and transformers would add that adapter: remove the one that is "
            f"not meant"
        )
    checkpoint = open_checkpoint(directory, copies=copies, allow_nonfinite=allow_nonfinite)
    file = checkpoint.directory / "config.json"
    family = family_of(checkpoint.config)
    fields = {key: value for key, value in checkpoint.config.items() if key not in _NOT_OF_THE_MODEL}
    layers = fields.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise ValueError(f"{file}: num_hidden_layers is {layers!r:.40}, expected a whole number")
    chosen = stored = Wiring.from_config(fields, layers)
    checkpoint.check_layers(layers)
    if adapter is not None:  # names that the files do not have are the built model's to refuse
        adapter.check_shapes({name: checkpoint.shape(name) for name in adapter.shapes if name in checkpoint})
    if wiring is not None:
        chosen = Wiring.parse(wiring, layers)
        stored.check_same_weights(chosen)
        fields[CONFIG_KEY] = chosen.spec
    check_wiring(family, chosen)
    found = CheckedSource(checkpoint, family, chosen, fields, adapter)
    if tp is not None:
        if shape := found.shape:
            check_divides(shape, family, tp, uneven)
            checkpoint.check_cuts(shape, tp)
        chosen.check_tp(tp)
    return found


def check_model(name: str, *, layers: int | None = None, wirings: Iterable[str] = (), tp: int | None = None) -> None:
    """What is measured: a checkpoint directory, or a published shape with random weights. ValueError unless it has these wirings and
    runs on ``tp`` ranks."""
    if layers is not None and layers < 1:
        raise ValueError(f"--layers must be at least 1, got {layers}")
    if Path(name).is_dir():
        if layers is not None:
            raise ValueError(f"--layers {layers} shortens a published shape; {name} is a checkpoint and measured whole")
        found = check_source(name, tp=tp)
        count, shape, family = found.wiring.num_layers, found.shape, found.family
    else:
        shape, family = ModelShape.from_name(name), None
        count = layers or shape.num_layers
    for spec in wirings:
        Wiring.parse(spec, count).check_tp(tp or 1)
    if tp is not None and shape is not None:
        check_divides(shape, family, tp, None)
