"""Quantised checkpoints: the config that says what the numbers mean, headers, numbers, scales, zero points and groups.

Any bits are some weight, so good checkpoints are drawn and not computed. What one stands for is unpacked here a second time.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from lab.fuzz.box import Box
from lab.fuzz.judge import require, same_bits, stored
from lab.fuzz.mutate import json_bytes, mutate_document
from lab.fuzz.targets.checkpoints import WIRINGS, broken_header, joined, split

SIDE, GROUP = 32, 32
AWQ_ROWS = [0, 2, 4, 6, 1, 3, 5, 7]  # of an int32's eight numbers, lowest bits first
PARTS = ["weight", "weight_scale", "weight_scale_inv", "input_scale", "weight_packed", "weight_shape", "weight_zero_point"]
PARTS += ["weight_g_idx", "qweight", "qzeros", "scales", "g_idx", "bias"]
FIELDS = ["quant_method", "format", "checkpoint_format", "config_groups", "weight_block_size", "bits", "group_size", "desc_act"]
FIELDS += ["zero_point", "version", "sparsity_config", "kv_cache_scheme", "dynamic", "activation_scheme"]


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FP8, INT4 = {"num_bits": 8, "type": "float", "symmetric": True}, {"num_bits": 4, "type": "int", "strategy": "group"}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8 tensor": compressed("float-quantized", **FP8, strategy="tensor"),
    "fp8 channel": compressed("float-quantized", **FP8, strategy="channel"),
    "fp8 block": {"quant_method": "fp8", "weight_block_size": [SIDE, SIDE]},
    "int4": compressed("pack-quantized", **INT4, symmetric=True, group_size=GROUP),
    "int4 zeros": compressed("pack-quantized", **INT4, symmetric=False, group_size=GROUP),
    "int4 order": compressed("pack-quantized", **INT4, symmetric=True, group_size=GROUP, actorder="group"),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq"},
    "gptq order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def drawn(name: str, rows: int, columns: int, random: torch.Generator) -> dict[str, Tensor]:
    """The tensors of one weight."""

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=random).int()

    def scales(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=random) + 0.5).mul(1e-3).half()

    groups = columns // GROUP
    order = torch.arange(columns).int() // GROUP
    shuffled = order[torch.randperm(columns, generator=random)]
    if name.startswith("fp8"):
        numbers = torch.randn(rows, columns, generator=random).mul(50).to(torch.float8_e4m3fn)
        scale = {"fp8 tensor": scales(1), "fp8 channel": scales(rows, 1)}.get(
            name, scales(-(-rows // SIDE), -(-columns // SIDE))
        )
        return {"weight": numbers, "weight_scale_inv" if name == "fp8 block" else "weight_scale": scale.float()}
    if name.startswith("int4"):
        more = {"int4 zeros": {"weight_zero_point": words(rows // 8, groups)}, "int4 order": {"weight_g_idx": shuffled}}
        held = {"weight_packed": words(rows, columns // 8), "weight_scale": scales(rows, groups)}
        return held | {"weight_shape": torch.tensor([rows, columns])} | more.get(name, {})
    held = {"qzeros": words(groups, rows // 8) & 0x77777777, "scales": scales(groups, rows)}
    if name == "awq":
        return held | {"qweight": words(columns, rows // 8)}
    return held | {"qweight": words(columns // 8, rows), "g_idx": shuffled if name == "gptq order" else order}


def nibbles(words: Tensor) -> Tensor:
    return torch.stack([words >> 4 * place & 15 for place in range(8)], -1).flatten(-2)


def awq_nibbles(words: Tensor) -> Tensor:
    numbers = nibbles(words).unflatten(-1, (-1, 8))
    rows = torch.empty_like(numbers)
    rows[..., AWQ_ROWS] = numbers
    return rows.flatten(-2)


def dense(parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """The weight that ``parts`` make."""
    if "weight" in parts:
        scale = parts.get("weight_scale", parts.get("weight_scale_inv", torch.zeros(())))
        numbers = parts["weight"].float()
        if sides := config.get("weight_block_size"):
            rows, columns = (torch.arange(length) // side for length, side in zip(numbers.shape, sides, strict=True))
            return numbers * scale.float()[rows][:, columns]
        return numbers * scale.float().reshape(-1, 1)
    zeros: Tensor
    if "weight_packed" in parts:
        numbers, scale = nibbles(parts["weight_packed"]), parts["weight_scale"]
        zeros = torch.full_like(scale, 8).int()
        if "weight_zero_point" in parts:
            zeros = nibbles(parts["weight_zero_point"].t()).t()
    elif "g_idx" in parts:
        less = "gptq_v2" not in (config.get("checkpoint_format"), config.get("format"))
        numbers, scale, zeros = nibbles(parts["qweight"].t()), parts["scales"].t(), nibbles(parts["qzeros"]).t() + less
    else:
        numbers, scale, zeros = awq_nibbles(parts["qweight"]).t(), parts["scales"].t(), awq_nibbles(parts["qzeros"]).t()
    groups = torch.arange(numbers.shape[1]) // (numbers.shape[1] // scale.shape[1])
    groups = parts.get("weight_g_idx", parts.get("g_idx", groups)).long()
    return (numbers - zeros[:, groups]).float() * scale.float()[:, groups]


def good(box: Box, name: str) -> tuple[dict[str, Any], bytes]:
    """Config and weights, drawn once a process: the demo's model with an MLP of whole groups."""
    made = box.made / f"{name}.safetensors"
    config = box.json("config.json") | {"intermediate_size": 4 * GROUP, "quantization_config": CONFIGS[name]}
    if not made.exists():
        random, tensors = torch.Generator().manual_seed(len(name)), load(box.good["model.safetensors"])
        for weight, tensor in list(tensors.items()):
            if weight.endswith("_proj.weight"):
                rows, columns = (
                    4 * GROUP if length == box.json("config.json")["intermediate_size"] else length for length in tensor.shape
                )
                del tensors[weight]
                module = weight.removesuffix(".weight")
                tensors |= {f"{module}.{part}": value for part, value in drawn(name, rows, columns, random).items()}
        made.write_bytes(save(tensors, {"format": "pt"}))
    return copy.deepcopy(config), made.read_bytes()


def quantised(box: Box, chance: Random) -> None:
    from ladder_residual.models.convert import convert
    from ladder_residual.models.inspect import inspect_checkpoint

    config, weights = good(box, chance.choice(list(CONFIGS)))
    kind = chance.randrange(4)
    if kind == 0:
        config["quantization_config"] = mutate_document(config["quantization_config"], chance, FIELDS)
    elif kind == 1:
        weights = broken_header(weights, chance)
    else:
        tensors, data = split(weights)
        names = [name for name in tensors if name.endswith(tuple(PARTS)) and "_proj." in name]
        chosen = tensors[name := chance.choice(names)]
        if kind == 2:
            written, (start, end) = bytearray(data), chosen["data_offsets"]
            for _ in range(chance.choice([1, 1, 20])):
                written[chance.randrange(start, end)] = chance.randrange(256)
            weights = joined(tensors, bytes(written))
        else:
            moved = copy.deepcopy(tensors)
            other = f"{name.rpartition('.')[0]}.{chance.choice(PARTS)}" if chance.random() < 0.7 else chance.choice(names)
            moved[other] = chosen | {
                "data_offsets": [len(data), len(data) + chosen["data_offsets"][1] - chosen["data_offsets"][0]]
            }
            weights = joined(moved, data + data[slice(*chosen["data_offsets"])])
    source = box.fresh(config__json=json_bytes(config), model__safetensors=weights)
    way = chance.randrange(4)
    if way == 0:
        about = inspect_checkpoint(source)
        require(about["quantization"] is not None, "inspect takes quantised weights for plain ones")
    elif way == 1:
        convert(source, source.parent / "converted", chance.choice(WIRINGS), copy=True)
        ours, theirs = stored(source.parent / "converted"), stored(source)
        require(ours.keys() == theirs.keys(), "convert changed the names of tensors")
        require(all(same_bits(ours[each], theirs[each]) for each in theirs), "convert changed weights")
    else:
        check_dequantised(source)


def check_dequantised(source: Path) -> None:
    from ladder_residual.models.loading import load_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_model(source)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    tensors = stored(source)
    for name, parameter in model.named_parameters():
        if not name.endswith("_proj.weight"):
            require(same_bits(parameter, tensors[name]), f"{name} is not what the file holds")
            continue
        module = name.removesuffix("weight")
        expected = dense({key.removeprefix(module): part for key, part in tensors.items() if key.startswith(module)}, config)
        require(bool(expected.isfinite().all()), f"{name} was loaded and is not finite")
        require(torch.allclose(parameter, expected, rtol=1e-6, atol=0), f"{name} is not what its tensors stand for")
