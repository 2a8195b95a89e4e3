"""Quantised checkpoints, written from the public layouts: numbers, zero points and scales are chosen, then packed, so that what a
reader must find is known without unpacking anything."""

import json
import math
import shutil

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import tiny_model

SIZES = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # row of each of an int32's eight numbers, lowest bits first
E4M3 = torch.float8_e4m3fn


def pack(numbers, order=range(8)):
    """[..., n] of 0 to 15 -> int32 [..., n / 8]."""
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // 8, dtype=torch.int64)
    for place, which in enumerate(order):
        words |= numbers[..., which::8].long() << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def fp8_scaled(weight, scale):
    """Numbers in E4M3, and what they stand for; ``scale`` broadcasts."""
    numbers = (weight / scale).clamp(-448, 448).to(E4M3)
    return numbers, numbers.float() * scale


def fp8_tensor(weight, static=False):
    scale = weight.abs().max().reshape(1) / 448
    numbers, dense = fp8_scaled(weight, scale)
    return {"weight": numbers, "weight_scale": scale} | ({"input_scale": torch.ones(1)} if static else {}), dense


def fp8_channel(weight):
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16().float()
    numbers, dense = fp8_scaled(weight, scale)
    return {"weight": numbers, "weight_scale": scale.bfloat16()}, dense


def fp8_block(weight, side=128, name="weight_scale_inv"):
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // side), -(-columns // side))
    dense, numbers = torch.empty_like(weight), torch.empty(rows, columns, dtype=E4M3)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * side, (i + 1) * side), slice(j * side, (j + 1) * side)
            scale[i, j] = weight[part].abs().max() / 448
            numbers[part], dense[part] = fp8_scaled(weight[part], scale[i, j])
    return {"weight": numbers, name: scale}, dense


def int4(weight, group, order=None):
    """(numbers 0 to 15, zero points, scales, what they stand for); ``order``: the group of each column."""
    rows, columns = weight.shape
    size = group or columns
    order = torch.arange(columns) // size if order is None else order
    groups = columns // size
    zeros, scales = torch.empty(rows, groups, dtype=torch.int64), torch.empty(rows, groups)
    for g in range(groups):
        part = weight[:, order == g]
        low, high = part.amin(1).clamp(max=-1e-3), part.amax(1).clamp(min=1e-3)
        scales[:, g] = ((high - low) / 15).half().float()
        zeros[:, g] = (-low / scales[:, g]).round().clamp(1, 14).long()
    numbers = ((weight / scales[:, order]).round() + zeros[:, order]).clamp(0, 15).long()
    return numbers, zeros, scales, (numbers - zeros[:, order]) * scales[:, order], order


def packed(weight, group=None, zero_points=False, shuffled=False):
    order = _shuffled(weight.shape[1], group) if shuffled else None
    numbers, zeros, scales, dense, order = int4(weight, group, order)
    parts = {
        "weight_packed": pack(numbers),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
        "weight_zero_point": pack(zeros.t().contiguous()).t().contiguous(),
    }
    if not zero_points:
        del parts["weight_zero_point"]
        dense = (numbers - 8) * scales[:, order]
    if shuffled:
        parts["weight_g_idx"] = order.to(torch.int32)
    return parts, dense


def gptq(weight, group=None, shuffled=False, v2=False):
    order = _shuffled(weight.shape[1], group) if shuffled else None
    numbers, zeros, scales, dense, order = int4(weight, group, order)
    return {
        "qweight": pack(numbers).t().contiguous(),
        "qzeros": pack((zeros if v2 else zeros - 1).t().contiguous()),
        "scales": scales.half().t().contiguous(),
        "g_idx": order.to(torch.int32),
    }, dense


def awq(weight, group=None):
    numbers, zeros, scales, dense, _ = int4(weight, group)
    return {
        "qweight": pack(numbers.t().contiguous(), AWQ_ORDER),
        "qzeros": pack(zeros.t().contiguous(), AWQ_ORDER),
        "scales": scales.half().t().contiguous(),
    }, dense


def _shuffled(columns, group):
    return (torch.arange(columns) // group)[torch.randperm(columns, generator=torch.Generator().manual_seed(3))]


def compressed_tensors(kind, weights, inputs=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def of_fp8(strategy, dynamic=True, **more):
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": dynamic}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    return compressed_tensors("float-quantized", weights | more, inputs)


def of_int4(group, symmetric=True, **more):
    strategy = "group" if group else "channel"
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    return compressed_tensors("pack-quantized", weights | more)


def of_gptq(group, desc_act=False, **more):
    return {"quant_method": "gptq", "bits": 4, "group_size": group or -1, "desc_act": desc_act, "sym": False} | more


def of_awq(group):
    return {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}


OF_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}

# name -> (quantization_config, function of a weight: its tensors, and what they stand for)
FORMATS = {
    "fp8-tensor-static": (of_fp8("tensor", dynamic=False), lambda w: fp8_tensor(w, static=True)),
    "fp8-channel": (of_fp8("channel"), fp8_channel),
    "fp8-ct-block": (
        of_fp8("block", block_structure=[128, 128]),
        lambda w: fp8_block(w, name="weight_scale"),
    ),
    "fp8-block": (OF_BLOCKS, fp8_block),
    "fp8-plain": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: fp8_tensor(w, static=True),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        fp8_channel,
    ),
    "int4-32": (of_int4(32), lambda w: packed(w, 32)),
    "int4-64-zeros": (of_int4(64, symmetric=False), lambda w: packed(w, 64, zero_points=True)),
    "int4-128": (of_int4(128), lambda w: packed(w, 128)),
    "int4-channel": (of_int4(None), packed),
    "int4-channel-zeros": (of_int4(None, symmetric=False), lambda w: packed(w, zero_points=True)),
    "int4-order": (of_int4(64, actorder="group"), lambda w: packed(w, 64, shuffled=True)),
    "gptq-128": (of_gptq(128), lambda w: gptq(w, 128)),
    "gptq-channel": (of_gptq(None), gptq),
    "gptq-v2": (of_gptq(32, checkpoint_format="gptq_v2"), lambda w: gptq(w, 32, v2=True)),
    "gptq-order": (of_gptq(64, desc_act=True), lambda w: gptq(w, 64, shuffled=True)),
    "awq-128": (of_awq(128), lambda w: awq(w, 128)),
    "awq-64": (of_awq(64), lambda w: awq(w, 64)),
    "awq-channel": (of_awq(None), awq),
}


def is_projection(name):
    module = name.removesuffix(".weight").rpartition(".")[2]
    return name.endswith(".weight") and (module.endswith("_proj") or module in ("w1", "w2", "w3"))


def write(directory, name, family="llama", seed=0, layers=2, **sizes):
    """A tiny model whose projections are in format ``name``; returns the plain tensors they stand for."""
    config, quantise = FORMATS[name]
    plain = {"attention_bias": False, "mlp_bias": False} if family == "llama" else {}
    model = tiny_model(family, seed=seed, num_hidden_layers=layers, **plain | SIZES | sizes)
    model.save_pretrained(directory)
    tensors, dense = {}, {}
    for tensor_name, tensor in load_file(directory / "model.safetensors").items():
        if not is_projection(tensor_name):
            tensors[tensor_name] = dense[tensor_name] = tensor
            continue
        parts, dense[tensor_name] = quantise(tensor)
        module = tensor_name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(directory, quantization_config=config)
    return dense


def write_plain(directory, like, dense):
    """The checkpoint that ``like`` stands for."""
    shutil.copytree(like, directory)
    rewrite_config(directory, quantization_config=None)
    save_file(
        {name: tensor.contiguous() for name, tensor in dense.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def rewrite_config(directory, **changes):
    config = json.loads((directory / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None or name != "quantization_config"}
    (directory / "config.json").write_text(json.dumps(kept))


def rewrite_tensors(directory, change):
    """``change(tensors)`` edits the dict in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def e4m3(byte):
    sign, exponent, mantissa = -1 if byte >> 7 else 1, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
