"""A LoRA adapter in peft's format: a directory without weights of its own, which names the checkpoint it belongs to.

It is read as if it were merged into that checkpoint. What peft can store beside plain LoRA matrices is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint_reader import CONFIG, FLOATS, open_safetensors, read_json, resolve, stored_shapes
from .sharding import ShardSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of peft's names, before the model's own
# Fields of LoraConfig that make something else of the matrices, or add other tensors.
_MUST_BE_EMPTY = (
    *("alora_invocation_tokens", "alpha_pattern", "arrow_config", "fan_in_fan_out", "kasa_config", "layer_replication"),
    *("lora_bias", "modules_to_save", "monteclora_config", "rank_pattern", "target_parameters", "trainable_token_indices"),
    *("use_bdlora", "use_dora", "use_qalora", "velora_config"),
)
_INITS = ("gaussian", "eva", "orthogonal", "mica")  # others leave a part of the base's weights in the matrices
_LARGEST_ALPHA = 10**6
_LONGEST_PATH = 4096


def is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG).is_file() and not (directory / CONFIG).exists()


def with_config(source: str | Path, *, weights: bool = True) -> Path:
    """The directory of ``source`` that holds ``config.json``: an adapter's is that of its base."""
    directory = resolve(source, weights=weights)
    return AdapterSource(directory).base(weights=weights) if is_adapter(directory) else directory


@dataclass(frozen=True)
class AdapterSource:
    """What ``adapter_config.json`` says. No torch."""

    directory: Path

    @cached_property
    def fields(self) -> dict[str, Any]:
        file = self.directory / ADAPTER_CONFIG
        fields = read_json(file)
        if fields.get("peft_type") != "LORA":
            raise ValueError(f"{file}: peft_type is {fields.get('peft_type')!r:.40}, supported is LORA")
        for name in _MUST_BE_EMPTY:
            if fields.get(name):
                raise ValueError(f"{file}: {name} is {fields[name]!r:.80}, which is not supported: merge it with peft first")
        init = fields.get("init_lora_weights", True)
        if not isinstance(init, bool | None) and init not in _INITS:
            raise ValueError(
                f"{file}: init_lora_weights is {init!r:.40}, which is not supported: it changes the base's weights too: merge it with "
                f"peft first"
            )
        if fields.get("bias", "none") != "none":
            raise ValueError(f"{file}: bias is {fields['bias']!r:.40}, supported is none: merge it with peft first")
        rank, alpha = fields.get("r"), fields.get("lora_alpha")
        if type(rank) is not int or rank < 1:
            raise ValueError(f"{file}: r is {rank!r:.40}, expected a whole number above 0")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _LARGEST_ALPHA:
            raise ValueError(f"{file}: lora_alpha is {alpha!r:.40}, expected a number up to {_LARGEST_ALPHA}")
        return fields

    @property
    def rank(self) -> int:
        return int(self.fields["r"])

    @property
    def scale(self) -> float:
        return float(self.fields["lora_alpha"] / (math.sqrt(self.rank) if self.fields.get("use_rslora") else self.rank))

    @property
    def file(self) -> Path:
        return self.directory / ADAPTER_WEIGHTS

    @cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of the product of each pair of matrices, by the weight it is added to; from the file's header."""
        if not self.file.is_file():
            raise ValueError(f"{self.directory} has no {ADAPTER_WEIGHTS}: is it an adapter of peft's?")
        pairs: dict[str, dict[str, int]] = {}
        for name, (shape, dtype) in stored_shapes(self.file).items():
            module, _, part = name.removesuffix(".weight").rpartition(".")
            if not name.startswith(_PREFIX) or not name.endswith(".weight") or part not in ("lora_A", "lora_B"):
                raise ValueError(f"{self.file}: {name:.120} is no lora_A.weight or lora_B.weight of a module")
            side = 0 if part == "lora_A" else 1
            if len(shape) != 2 or shape[side] != self.rank or dtype not in FLOATS:
                raise ValueError(
                    f"{self.file}: {name} is {dtype} {list(shape)}, expected a matrix of rank {self.rank} in {', '.join(FLOATS)}"
                )
            pairs.setdefault(f"{module.removeprefix(_PREFIX)}.weight", {})[part] = shape[1 - side]
        for name, pair in pairs.items():
            if len(pair) != 2:
                raise ValueError(f"{self.file} has {min(pair)} of {name}, and not the other matrix")
        if not pairs:
            raise ValueError(f"{self.file} holds no matrices")
        return {name: (pair["lora_B"], pair["lora_A"]) for name, pair in pairs.items()}

    def check_shapes(self, weights: Mapping[str, tuple[int, ...]]) -> None:
        """ValueError unless each product fits the weight of its name, where ``weights`` has it."""
        for name, shape in self.shapes.items():
            if shape != weights.get(name, shape):
                raise ValueError(
                    f"{self.file}: the matrices for {name} make {list(shape)}, its base has {list(weights[name])}: another base is meant"
                )

    def digest(self) -> str:
        names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        content = b"".join((self.directory / name).read_bytes() for name in names if (self.directory / name).is_file())
        return hashlib.sha256(content).hexdigest()

    def base(self, *, weights: bool = True) -> Path:
        file, name = self.directory / ADAPTER_CONFIG, self.fields.get("base_model_name_or_path")
        if not isinstance(name, str) or not 0 < len(name) < _LONGEST_PATH:
            raise ValueError(f"{file}: base_model_name_or_path is {name!r:.80}: write the checkpoint it belongs to there")
        try:
            base = resolve(name, weights=weights)
        except (ValueError, OSError) as error:
            raise ValueError(f"{file}: base_model_name_or_path: {getattr(error, 'strerror', None) or error}") from None
        if is_adapter(base):
            raise ValueError(f"{file}: base_model_name_or_path is {name}, an adapter too: merge that one with ladder convert")
        return base


class Adapter:
    """The matrices of an adapter, added to the weights of its base as those are read."""

    def __init__(self, source: AdapterSource, *, allow_nonfinite: bool = False) -> None:
        from .finite import check_weight

        self.source, self.file, self.allow_nonfinite = source, source.file, allow_nonfinite
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        shapes = source.shapes
        with open_safetensors(self.file) as handle:
            for name in shapes:
                stored = [f"{_PREFIX}{name.removesuffix('.weight')}.{part}.weight" for part in ("lora_B", "lora_A")]
                tall, wide = (handle.get_tensor(part) for part in stored)
                if not allow_nonfinite:
                    check_weight(stored[0], tall, self.file)
                    check_weight(stored[1], wide, self.file)
                self.pairs[name] = tall, wide

    def check(self, model: nn.Module) -> None:
        """ValueError unless each pair fits a parameter of ``model``."""
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name in self.pairs:
            if name not in shapes:
                raise ValueError(
                    f"{self.file} has matrices for {name}, which its base model does not have: another base is meant"
                )
        self.source.check_shapes(shapes)

    def added(self, name: str, weight: Tensor, spec: ShardSpec | None) -> Tensor:
        """In float32, where there is something to add; ``weight`` is what ``spec`` keeps of ``name``."""
        import torch

        from .chunks import local_part
        from .finite import check_weight

        if name not in self.pairs:
            return weight
        tall, wide = (matrix.to(torch.float32) for matrix in self.pairs[name])
        if spec is not None and spec.dim == 0:
            tall = local_part(tall, spec)
        elif spec is not None:
            wide = local_part(wide, spec)
        weight = weight.to(torch.float32) + self.source.scale * (tall @ wide)
        if not self.allow_nonfinite:
            check_weight(f"{name} with this adapter added", weight, self.file)
        return weight
