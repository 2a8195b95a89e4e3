"""A quantised checkpoint, read as if its weights were plain: the tensors of a module are one ``weight``, dequantised when it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint_reader import CONFIG, Checkpoint, read_json
from ..sharding import ShardSpec, shard_of
from .awq import Awq
from .fp8 import Fp8
from .gptq import Gptq
from .layout import PLAIN, Layout, Stored
from .packed_int4 import PackedInt4
from .spec import QuantSpec, read_spec

if TYPE_CHECKING:
    from torch import Tensor

    from ..presets import ModelShape

BYTES = {"F8_E4M3": 1, "I32": 4, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "F64": 8}


def open_checkpoint(directory: Path, **options: Any) -> Checkpoint:
    """``options``: see ``Checkpoint``."""
    spec = read_spec(read_json(directory / CONFIG), directory / CONFIG)
    return QuantizedCheckpoint(directory, spec, **options) if spec else Checkpoint(directory, **options)


def layout_of(spec: QuantSpec) -> Layout:
    layouts: dict[str, Callable[[QuantSpec], Layout]] = {"gptq": Gptq, "awq": Awq}
    by_format: dict[str, Callable[[QuantSpec], Layout]] = {"fp8": Fp8, "int4": PackedInt4}
    return layouts.get(spec.method, by_format[spec.format])(spec)


@dataclass(frozen=True)
class QuantizedWeight:
    """The tensors of one module."""

    module: str
    held: Mapping[str, Stored]
    shape: tuple[int, int]

    def name_of(self, part: str) -> str:
        return f"{self.module}.{part}"


class QuantizedCheckpoint(Checkpoint):
    """``names`` holds ``X.weight`` for each quantised module ``X``; ``files`` still says where every tensor lies."""

    quantised = True

    def __init__(self, directory: Path, spec: QuantSpec, **options: Any) -> None:
        super().__init__(directory, **options)
        self.spec, self.layout = spec, layout_of(spec)
        self.weights = self._quantised_weights()
        if not self.weights:
            raise ValueError(
                f"{directory} holds no {self.layout.main} of {spec.describe()}, which its config.json says it has: remove "
                f"quantization_config there if the weights are plain"
            )
        belong = {weight.name_of(part) for weight in self.weights.values() for part in weight.held}
        self.names = dict.fromkeys([*(name for name in self.files if name not in belong), *self.weights])

    def _quantised_weights(self) -> dict[str, QuantizedWeight]:
        modules: dict[str, dict[str, Stored]] = {}
        for name in self.files:
            module, _, part = name.rpartition(".")
            if part in self.layout.parts:
                modules.setdefault(module, {})[part] = Stored(*self.stored(name))
        found = {}
        for module, held in modules.items():
            if not self.layout.is_quantised(held):
                continue
            with self._blamed(module):
                if f"{module}.weight" in self.files and "weight" not in held:
                    raise ValueError(
                        f"stored quantised ({self.layout.main}) and as {module}.weight beside it: one of them is wrong"
                    )
                found[f"{module}.weight"] = QuantizedWeight(module, held, self.layout.shape(held))
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.weights:
            return self.weights[name].shape
        if (dtype := self.stored(name)[1]) not in PLAIN:
            raise ValueError(
                f"{self.directory / self.files[name]}: {name} is stored as {dtype} and belongs to no weight in {self.spec.describe()}: "
                f"formats are mixed, which is not supported, or a tensor of that weight is missing"
            )
        return super().shape(name)

    def read(self, name: str, spec: ShardSpec | None = None) -> Tensor:
        """In float32 where it is quantised."""
        if name not in self.weights:
            return super().read(name, spec)
        return self._parts_and_weight(name, spec)[1]

    def read_parts(self, name: str, spec: ShardSpec | None = None) -> dict[str, Tensor]:
        """The tensors of a quantised weight as they are stored, checked as ``read`` does."""
        return self._parts_and_weight(name, spec)[0]

    def _parts_and_weight(self, name: str, spec: ShardSpec | None) -> tuple[dict[str, Tensor], Tensor]:
        from ..finite import check_weight

        self.used.add(name)
        weight = self.weights[name]
        with self._blamed(weight.module):
            specs = self.layout.shard_specs(weight.shape, spec)
        parts = {part: self.read_stored(weight.name_of(part), kept) for part, kept in specs.items() if part in weight.held}
        if not self.allow_nonfinite:
            for part in parts.keys() & self.layout.scales:
                check_weight(weight.name_of(part), parts[part], self._file(weight, part))
        with self._blamed(weight.module):
            self.layout.check(parts, weight.shape)
        tensor = self.layout.dequantise(parts)
        if not self.allow_nonfinite:
            check_weight(name, tensor, self._file(weight, self.layout.main))
        return parts, tensor

    def file_of(self, name: str) -> str:
        return self.files[self.weights[name].name_of(self.layout.main) if name in self.weights else name]

    def _file(self, weight: QuantizedWeight, part: str) -> Path:
        return self.directory / self.files[weight.name_of(part)]

    @contextmanager
    def _blamed(self, module: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.directory}: {module}.weight, {self.spec.describe()}: {error}") from None

    def blocks(self, name: str) -> Iterator[bytes]:
        if name not in self.weights:
            yield from super().blocks(name)
            return
        weight = self.weights[name]
        for part in sorted(weight.held):
            yield from super().blocks(weight.name_of(part))

    def check_all_used(self) -> None:
        """AutoGPTQ wrote a bias of zeros beside each weight of models that have none: it adds nothing."""
        for weight in self.weights.values():
            bias = weight.name_of("bias")
            if bias not in self.names or bias in self.used:
                continue
            shape, dtype = self.stored(bias)
            if shape == weight.shape[:1] and dtype in PLAIN and not self.read_stored(bias, None).any():
                del self.names[bias]
        super().check_all_used()

    def check_cuts(self, shape: ModelShape, tp: int) -> None:
        for rank in range(tp):
            for name, weight in self.weights.items():
                with self._blamed(weight.module):
                    self.layout.shard_specs(weight.shape, shard_of(name, weight.shape, shape, tp, rank))

    def stored_bytes(self, name: str, spec: ShardSpec | None, itemsize: int) -> int:
        if name not in self.weights:
            return super().stored_bytes(name, spec, itemsize)
        weight, total = self.weights[name], 0
        with self._blamed(weight.module):
            for part, kept in self.layout.shard_specs(weight.shape, spec).items():
                if part in weight.held:
                    shape, dtype = weight.held[part]
                    total += BYTES[dtype] * prod(kept.local_shape(shape) if kept else shape)
        return total

    def dtype(self) -> str:
        return next((self.stored(name)[1] for name in self.names if name not in self.weights), "F32")
