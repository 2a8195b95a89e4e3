"""How a checkpoint's weights are quantised, read from ``quantization_config`` of its ``config.json``. No torch.

What the fields say is checked against what this package computes; the tensors are checked where they lie (``checkpoint.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

GROUPS = (32, 64, 128)
SUPPORTED = (
    "fp8 of compressed-tensors (float-quantized), fp8 and fbgemm_fp8; int4 of compressed-tensors (pack-quantized), gptq and awq"
)


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """One way of quantising, the same for every quantised weight of a checkpoint."""

    method: str  # who wrote it: compressed-tensors, fp8, fbgemm_fp8, gptq, awq
    format: str  # fp8 (E4M3) or int4
    scales: str  # one per: tensor, channel (output row), block or group (of columns in a row)
    group: int | None = None  # columns of a group
    block: tuple[int, int] | None = None  # rows and columns of a block
    zero_points: bool = False
    act_order: bool = False  # columns belong to groups in any order (g_idx)
    zeros_minus_one: bool = False  # GPTQ's first format stores zero points less one
    activations: str = "unquantised"  # or static, dynamic: what the checkpoint asks for

    @property
    def bits(self) -> int:
        return {"fp8": 8, "int4": 4}[self.format]

    def columns_of_a_scale(self, columns: int) -> int:
        """In a row of ``columns``."""
        return self.group or (self.block[1] if self.block else columns)

    def describe(self) -> str:
        """``int4 (gptq, groups of 128, zero points, act-order)``"""
        scales = {
            "tensor": "a scale per tensor",
            "channel": "a scale per channel",
            "block": f"blocks of {self.block[0]}x{self.block[1]}" if self.block else "",
            "group": f"groups of {self.group}",
        }[self.scales]
        extras = [scales, *(["zero points"] if self.zero_points else []), *(["act-order"] if self.act_order else [])]
        return f"{self.format} ({', '.join([self.method, *extras])})"

    def to_dict(self) -> dict[str, Any]:
        return {"description": self.describe(), "bits": self.bits, **asdict(self)}


def read_spec(config: Mapping[str, Any], where: object) -> QuantSpec | None:
    """Of a ``config.json`` (at ``where``); None if its weights are plain. ValueError says what is supported."""
    fields = config.get("quantization_config")
    if not fields:
        return None
    if not isinstance(fields, Mapping):
        raise ValueError(f"{where}: quantization_config is {fields!r:.80}, expected an object; supported: {SUPPORTED}")
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise ValueError(f"{where}: quant_method is {method!r:.80}; supported: {SUPPORTED}")
    try:
        return _READERS[method](fields)
    except ValueError as error:
        raise ValueError(f"{where}: quantization_config of {method}: {error}") from None


def _fixed(fields: Mapping[str, Any], **expected: Any) -> None:
    """ValueError where a field is there and says something else than what we compute (a tuple: one of these)."""
    for name, value in expected.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if name in fields and not any(fields[name] == one and type(fields[name]) is type(one) for one in allowed):
            words = " or ".join(repr(one) for one in allowed if one or one is False) or "none"
            raise ValueError(f"{name} is {fields[name]!r:.80}, supported is {words}")


def _group(value: Any, name: str = "group_size") -> int | None:
    """None: the whole row."""
    if value in (-1, None) and not isinstance(value, bool):
        return None
    if isinstance(value, bool) or value not in GROUPS:
        raise ValueError(f"{name} is {value!r:.40}, supported are {', '.join(map(str, GROUPS))} and -1 (the whole row)")
    return int(value)


def _of_groups(group: int | None) -> dict[str, Any]:
    return {"scales": "channel"} if group is None else {"scales": "group", "group": group}


def _block(value: Any, name: str) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(side) is int and side > 0 for side in value):
        raise ValueError(f"{name} is {value!r:.40}, expected rows and columns such as [128, 128]")
    return value[0], value[1]


def _compressed_tensors(fields: Mapping[str, Any]) -> QuantSpec:
    _fixed(fields, quantization_status=("compressed", "frozen", None), kv_cache_scheme=(None, {}))
    for name in ("sparsity_config", "transform_config"):
        inside = fields.get(name)
        if inside and not (isinstance(inside, Mapping) and inside.get("format") == "dense"):
            raise ValueError(f"{name} is {inside!r:.80}, supported is none")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(one, Mapping) for one in groups.values()):
        raise ValueError(f"config_groups is {groups!r:.80}, expected at least one group of layers")
    specs = {_config_group({"format": fields.get("format"), **_said(one)}) for one in groups.values()}
    if len(specs) > 1:
        several = "; ".join(sorted(spec.describe() for spec in specs))
        raise ValueError(f"config_groups mixes {len(specs)} formats ({several}), supported is one for all layers")
    return specs.pop()


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _config_group(group: Mapping[str, Any]) -> QuantSpec:
    weights, kind = group.get("weights"), group.get("format")
    if not isinstance(weights, Mapping):
        raise ValueError(f"weights of a group is {weights!r:.80}, expected an object")
    weights = _said(weights)
    strategy = weights.get("strategy")
    inputs = group.get("input_activations")
    if kind == "float-quantized":
        _fixed(weights, num_bits=8, type="float", symmetric=True, strategy=("tensor", "channel", "block"))
        block = _block(weights.get("block_structure"), "block_structure") if strategy == "block" else None
        if strategy is None:
            raise ValueError("strategy of the weights is missing, supported are tensor, channel and block")
        dynamic = bool(inputs.get("dynamic")) if isinstance(inputs, Mapping) else None
        activations = {True: "dynamic", False: "static", None: "unquantised"}[dynamic]
        return QuantSpec(method="compressed-tensors", format="fp8", scales=strategy, block=block, activations=activations)
    if kind == "pack-quantized":
        _fixed(weights, num_bits=4, type="int", strategy=("group", "channel"), symmetric=(True, False))
        _fixed(weights, actorder=("weight", "static", "group", "dynamic", False))
        if inputs:
            raise ValueError(f"input_activations is {inputs!r:.80}, supported is none beside int4 weights")
        if strategy is None:
            raise ValueError("strategy of the weights is missing, supported are group and channel")
        size = _group(weights.get("group_size")) if strategy == "group" else None
        if strategy == "group" and size is None:
            raise ValueError(f"group_size is missing, supported are {', '.join(map(str, GROUPS))}")
        return QuantSpec(
            method="compressed-tensors",
            format="int4",
            **_of_groups(size),
            zero_points=not weights.get("symmetric", True),
            act_order=weights.get("actorder") in ("group", "dynamic"),
        )
    raise ValueError(f"format is {kind!r:.40}, supported are float-quantized and pack-quantized")


def _fine_grained_fp8(fields: Mapping[str, Any]) -> QuantSpec:
    _fixed(fields, fmt=("e4m3", None), activation_scheme=("dynamic", "static"), scale_fmt=("float", "ue8m0", None))
    sizes = fields.get("weight_block_size")
    scales: dict[str, Any] = {"scales": "tensor"}
    if sizes is not None:
        scales = {"scales": "block", "block": _block(sizes, "weight_block_size")}
    return QuantSpec(method="fp8", format="fp8", **scales, activations=fields.get("activation_scheme", "dynamic"))


def _fbgemm_fp8(fields: Mapping[str, Any]) -> QuantSpec:
    return QuantSpec(method="fbgemm_fp8", format="fp8", scales="channel", activations="dynamic")


def _gptq(fields: Mapping[str, Any]) -> QuantSpec:
    _required(fields, "bits", "group_size")
    _fixed(fields, bits=4, pack_dtype=("int32", None), is_marlin_format=False, desc_act=(True, False), dynamic=(None, {}))
    formats = ("gptq", "gptq_v2", "", None)
    _fixed(fields, checkpoint_format=formats, format=formats)  # its name in older and newer releases of GPTQModel
    return QuantSpec(
        method="gptq",
        format="int4",
        **_of_groups(_group(fields["group_size"])),
        zero_points=True,
        act_order=fields.get("desc_act", False),
        zeros_minus_one="gptq_v2" not in (fields.get("checkpoint_format"), fields.get("format")),
    )


def _awq(fields: Mapping[str, Any]) -> QuantSpec:
    older = {"bits": fields.get("w_bit"), "group_size": fields.get("q_group_size"), "version": fields.get("format", "gemm")}
    fields = older | dict(fields)
    _required(fields, "bits", "group_size")
    version = fields["version"]
    fields["version"] = version.lower() if isinstance(version, str) else version
    _fixed(fields, bits=4, version="gemm", zero_point=True)
    return QuantSpec(method="awq", format="int4", **_of_groups(_group(fields["group_size"])), zero_points=True)


def _required(fields: Mapping[str, Any], *names: str) -> None:
    missing = [name for name in names if fields.get(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")


_READERS: dict[str, Callable[[Mapping[str, Any]], QuantSpec]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fine_grained_fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "gptq": _gptq,
    "awq": _awq,
}
