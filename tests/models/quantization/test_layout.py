"""Each layout against plain loops over its public definition, and against the libraries that define it."""

import random

import pytest
import torch

from ladder_residual.models.convert import convert
from ladder_residual.models.quantization.checkpoint import layout_of
from ladder_residual.models.quantization.spec import read_spec
from tests.models.quantization.written import FORMATS, e4m3, write


def nibble(word, place):
    return (int(word) >> (4 * place)) & 15  # Python's shift keeps the sign, the mask drops it


def random_words(*shape):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)


def by_loops(spec, parts, rows, columns):
    """weight[i][j], number by number."""
    size = spec.group or columns
    found = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            g = j // size
            if spec.method == "gptq":
                g = int(parts["g_idx"][j]) if spec.act_order else g
                number = nibble(parts["qweight"][j // 8, i], j % 8)
                zero = nibble(parts["qzeros"][g, i // 8], i % 8) + spec.zeros_minus_one
                scale = parts["scales"][g, i]
            elif spec.method == "awq":
                place = (0, 4, 1, 5, 2, 6, 3, 7)[i % 8]
                number = nibble(parts["qweight"][j, i // 8], place)
                zero = nibble(parts["qzeros"][g, i // 8], place)
                scale = parts["scales"][g, i]
            elif spec.format == "int4":
                g = int(parts["weight_g_idx"][j]) if spec.act_order else g
                number = nibble(parts["weight_packed"][i, j // 8], j % 8) - 8
                zero = nibble(parts["weight_zero_point"][i // 8, g], i % 8) - 8 if spec.zero_points else 0
                scale = parts["weight_scale"][i, g]
            else:
                number, zero = e4m3(int(parts["weight"].view(torch.uint8)[i, j])), 0
                scale = next(t for name, t in parts.items() if name.startswith("weight_scale"))
                if spec.block:
                    scale = scale[i // spec.block[0], j // spec.block[1]]
                elif spec.scales == "channel":
                    scale = scale[i, 0]
            found[i, j] = (number - zero) * float(scale)
    return found


def random_parts(spec, rows, columns):
    """Every bit is random, where a format allows it."""
    groups = columns // spec.group if spec.group else 1
    scales = torch.rand(groups, rows).half() + 0.01
    order = (
        torch.tensor(random.Random(1).sample([j // spec.group for j in range(columns)], columns)) if spec.act_order else None
    )
    if spec.method == "gptq":
        zeros = random_words(groups, rows // 8) & (0x77777777 if spec.zeros_minus_one else -1)  # 15 is refused
        order = torch.arange(columns) // (spec.group or columns) if order is None else order
        return {"qweight": random_words(columns // 8, rows), "qzeros": zeros, "scales": scales, "g_idx": order.int()}
    if spec.method == "awq":
        return {"qweight": random_words(columns, rows // 8), "qzeros": random_words(groups, rows // 8), "scales": scales}
    if spec.format == "int4":
        parts = {"weight_packed": random_words(rows, columns // 8), "weight_scale": scales.t().contiguous()}
        parts["weight_shape"] = torch.tensor([rows, columns])
        if spec.zero_points:
            parts["weight_zero_point"] = random_words(-(-rows // 8), groups)
        return parts | ({"weight_g_idx": order.int()} if order is not None else {})
    bits = torch.arange(rows * columns).remainder(256).to(torch.uint8)
    bits[(bits & 127) == 127] = 0  # NaN
    shape = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}[spec.scales]
    name = "weight_scale_inv" if spec.method == "fp8" and spec.block else "weight_scale"
    return {"weight": bits.view(rows, columns).view(torch.float8_e4m3fn), name: torch.rand(shape) + 0.01}


@pytest.mark.parametrize("name", FORMATS)
def test_every_number(name):
    spec = read_spec({"quantization_config": FORMATS[name][0]}, "config.json")
    rows, columns = (136, 256) if spec.block else (24, 256)  # 136: the last block of rows is not whole
    parts = random_parts(spec, rows, columns)
    found = layout_of(spec).dequantise(parts)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, by_loops(spec, parts, rows, columns), rtol=1e-6, atol=0)


def compressed_tensors_names():
    return [name for name, (config, _) in FORMATS.items() if config["quant_method"] == "compressed-tensors"]


@pytest.mark.parametrize(
    "name", [name for name in compressed_tensors_names() if name != "int4-order"]
)  # which it no longer reads
def test_the_library_of_the_format_agrees(name):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig

    config, quantise = FORMATS[name]
    scheme = QuantizationConfig(**config).config_groups["group_0"]
    parts, _ = quantise(torch.randn(64 if "block" not in name else 256, 256, generator=torch.Generator().manual_seed(2)))
    theirs = compressors.BaseCompressor.get_value_from_registry(config["format"]).decompress(parts, scheme)["weight"]
    ours = layout_of(read_spec({"quantization_config": config}, "")).dequantise(parts)
    assert torch.equal(ours.to(theirs.dtype), theirs)


@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_transformers_agrees_on_blocks(wiring, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    dense = write(tmp_path / "plain", "fp8-block", layers=1)
    convert(tmp_path / "plain", tmp_path / "wired", wiring)
    asked = FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wired", quantization_config=asked)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, dense[name]), name
