"""Whatever a config or a header says, reading it ends in a spec, a shape or a ``ValueError``."""

import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ladder_residual.models.quantization.checkpoint import layout_of
from ladder_residual.models.quantization.layout import Stored
from ladder_residual.models.quantization.spec import QuantSpec, read_spec
from ladder_residual.models.sharding import ShardSpec
from tests.models.quantization.written import FORMATS

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([4, 8, 128, "gemm", "gptq_v2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({key for config, _ in FORMATS.values() for key in config} | {"dynamic", "checkpoint_format", "sparsity_config"})
INNER = ["num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder", "dynamic"]


def spec_of(name):
    return read_spec({"quantization_config": FORMATS[name][0]}, "config.json")


@settings(max_examples=300)
@given(st.sampled_from(sorted(FORMATS)), st.sampled_from(KEYS), st.sampled_from(INNER), JSON, st.booleans())
def test_configs(name, key, inner, value, deep):
    config = json.loads(json.dumps(FORMATS[name][0]))
    if deep and "config_groups" in config:
        config["config_groups"]["group_0"]["weights"][inner] = value
    else:
        config[key] = value
    try:
        found = read_spec({"quantization_config": config}, "config.json")
    except ValueError as error:
        assert str(error).startswith("config.json: ")
        assert "\n" not in str(error)
    else:
        assert found is None or isinstance(found, QuantSpec)
        assert hash(found) is not None
        assert found.describe()


SHAPES = st.lists(st.sampled_from([0, 1, 2, 4, 8, 16, 64, 128, 256, 512]), max_size=3).map(tuple)
DTYPES = st.sampled_from(["F8_E4M3", "F8_E5M2", "F32", "F16", "BF16", "I32", "I64", "I8", "U8", "BOOL"])


@settings(max_examples=300)
@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_headers(name, data):
    layout = layout_of(spec_of(name))
    held = {part: Stored(data.draw(SHAPES), data.draw(DTYPES)) for part in layout.parts if data.draw(st.booleans())}
    try:
        shape = layout.shape(held)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert len(shape) == 2
        assert min(shape) > 0


@settings(max_examples=200)
@example("gptq-128", 0, [(0, 1)], 8)  # one int32 of zero points in a row
@given(
    st.sampled_from(sorted(FORMATS)),
    st.integers(0, 1),
    st.lists(st.tuples(st.integers(0, 64), st.integers(1, 64)), min_size=1, max_size=2),
    st.sampled_from([1, 4, 8, 16, 32]),
)
def test_what_a_shard_keeps_is_that_part_of_the_weight_or_it_is_refused(name, dim, spans, unit):
    """The slow twin of every shard: dequantise all of it, then take the part."""
    ranges = tuple((first * unit % 256, min(256, first * unit % 256 + length * unit)) for first, length in spans)
    if len(ranges) == 2 and not ranges[0][1] <= ranges[1][0]:
        ranges = ranges[:1]
    if len(ranges) == 2 and dim == 1:
        ranges = ranges[:1]  # columns are never sharded in two ranges
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
    parts, dense = FORMATS[name][1](weight)
    layout, shard = layout_of(spec_of(name)), ShardSpec(dim, ranges)
    try:
        specs = layout.shard_specs((256, 256), shard)
    except ValueError as error:
        assert "no whole number of" in str(error)
        return
    kept = {part: part_of(tensor, specs[part]) for part, tensor in parts.items() if part in specs}
    assert torch.equal(layout.dequantise(kept), part_of(dense, shard))


def part_of(tensor, spec):
    if spec is None:
        return tensor
    return torch.cat([tensor.narrow(spec.dim, start, stop - start) for start, stop in spec.ranges], spec.dim)


@pytest.mark.parametrize("side", [1, 200, 10**9])
def test_blocks_of_any_size(side):
    spec = read_spec({"quantization_config": FORMATS["fp8-block"][0] | {"weight_block_size": [side, side]}}, "")
    tall = -(-6 // side)
    parts = {"weight": torch.ones(6, 6).to(torch.float8_e4m3fn), "weight_scale_inv": torch.rand(tall, tall)}
    expected = parts["weight_scale_inv"] if side == 1 else parts["weight_scale_inv"].expand(6, 6)
    assert torch.equal(layout_of(spec).dequantise(parts), expected)
