"""What is wrong with a quantised checkpoint is said in one line: the tensor, the numbers, what is supported."""

import json

import pytest
import torch

from ladder_residual.models.convert import convert
from ladder_residual.models.inspect import inspect_checkpoint
from ladder_residual.models.loading import load_model
from ladder_residual.models.preflight import check_source
from tests.models.quantization.written import FORMATS, OF_BLOCKS, rewrite_config, rewrite_tensors, write

UP = "model.layers.0.mlp.up_proj"  # [512, 256]
DOWN = "model.layers.1.mlp.down_proj"  # [256, 512]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A good checkpoint of each format, for tests to copy."""
    root = tmp_path_factory.mktemp("good")
    made = {}

    def get(name):
        if name not in made:
            write(root / name, name)
            made[name] = root / name
        return made[name]

    return get


@pytest.fixture
def copy(whole, tmp_path):
    def of(name):
        for file in ("config.json", "model.safetensors"):
            (tmp_path / file).write_bytes((whole(name) / file).read_bytes())
        return tmp_path

    return of


def changed(name, **changes):
    """The config of a format with other weights (``weights={...}``), another group (``group={...}``) or other fields."""
    config = json.loads(json.dumps(FORMATS[name][0]))
    weights, group = changes.pop("weights", {}), changes.pop("group", {})
    if weights or group:
        config["config_groups"]["group_0"]["weights"] |= weights
        config["config_groups"]["group_0"] |= group
    return config | changes


def two_groups(second):
    config = changed("int4-128")
    config["config_groups"]["group_1"] = changed("int4-128", weights=second)["config_groups"]["group_0"]
    return config


CONFIGS = {
    "no object": ("int4-32", 4, "quantization_config is 4, expected an object; supported: fp8 of compressed-tensors"),
    "unknown method": ("int4-32", {"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported: fp8 of"),
    "no method": ("int4-32", {"bits": 4}, "quant_method is None; supported: fp8 of"),
    "unknown format": (
        "int4-32",
        changed("int4-32", format="nvfp4-pack-quantized"),
        "format is 'nvfp4-pack-quantized', supported",
    ),
    "no groups": ("int4-32", changed("int4-32", config_groups={}), "config_groups is {}, expected at least one"),
    "mixed groups": ("int4-128", two_groups({"group_size": 32}), "mixes 2 formats (int4 (compressed-tensors, groups of 128)"),
    "8 bits": ("int4-32", changed("int4-32", weights={"num_bits": 8}), "num_bits is 8, supported is 4"),
    "group of 16": (
        "int4-32",
        changed("int4-32", weights={"group_size": 16}),
        "group_size is 16, supported are 32, 64, 128 and -1",
    ),
    "no group": (
        "int4-32",
        changed("int4-32", weights={"group_size": None}),
        "group_size is missing, supported are 32, 64, 128",
    ),
    "int4 per tensor": (
        "int4-32",
        changed("int4-32", weights={"strategy": "tensor"}),
        "strategy is 'tensor', supported is 'group'",
    ),
    "int4 with int8 activations": (
        "int4-32",
        changed("int4-32", group={"input_activations": {"num_bits": 8}}),
        "input_activations is {'num_bits': 8}, supported is none",
    ),
    "sparse": ("int4-32", changed("int4-32", sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is {'format'"),
    "fp8 cache": (
        "fp8-channel",
        changed("fp8-channel", kv_cache_scheme={"num_bits": 8}),
        "{'num_bits': 8}, supported is none",
    ),
    "not compressed": (
        "fp8-channel",
        changed("fp8-channel", quantization_status="calibration"),
        "quantization_status is 'calibr",
    ),
    "fp8 in groups": (
        "fp8-channel",
        changed("fp8-channel", weights={"strategy": "group"}),
        "strategy is 'group', supported is",
    ),
    "e5m2": ("fp8-block", OF_BLOCKS | {"fmt": "e5m2"}, "fmt is 'e5m2', supported is 'e4m3'"),
    "a block of one side": ("fp8-block", OF_BLOCKS | {"weight_block_size": [128]}, "weight_block_size is [128], expected"),
    "gptq of 8 bits": ("gptq-128", changed("gptq-128", bits=8), "bits is 8, supported is 4"),
    "gptq without bits": ("gptq-128", {"quant_method": "gptq", "group_size": 128}, "quantization_config of gptq: bits missing"),
    "gptq groups of 1024": (
        "gptq-128",
        changed("gptq-128", group_size=1024),
        "group_size is 1024, supported are 32, 64, 128 and -1",
    ),
    "gptq for marlin": (
        "gptq-128",
        changed("gptq-128", checkpoint_format="marlin"),
        "checkpoint_format is 'marlin', supported is",
    ),
    "gptq mixed": (
        "gptq-128",
        changed("gptq-128", dynamic={"-:lm_head": {}}),
        "dynamic is {'-:lm_head': {}}, supported is none",
    ),
    "awq gemv": ("awq-128", changed("awq-128", version="GEMV"), "version is 'gemv', supported is 'gemm'"),
    "awq without zeros": ("awq-128", changed("awq-128", zero_point=False), "zero_point is False, supported is True"),
    "awq of 3 bits": ("awq-128", {"quant_method": "awq", "w_bit": 3, "q_group_size": 128}, "bits is 3, supported is 4"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(case, copy):
    name, config, named = CONFIGS[case]
    directory = copy(name)
    rewrite_config(directory, quantization_config=config)
    with pytest.raises(ValueError, match="config.json") as caught:
        check_source(directory)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, make):
    """``make`` changes a copy of the tensor, or returns another one."""

    def change(tensors):
        tensor = tensors[name].clone()
        returned = make(tensor)
        tensors[name] = tensor if returned is None else returned

    return change


def add(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def set_first(value):
    def make(tensor):
        tensor.view(-1)[0] = value

    return make


NAN = float("nan")
HEADERS = {
    "fp8 without scale": ("fp8-channel", drop(f"{UP}.weight_scale"), f"{UP}.weight, fp8", "has no weight_scale"),
    "fp8 per tensor": (
        "fp8-channel",
        put(f"{UP}.weight_scale", lambda s: s[0]),
        "weight_scale has shape [1], expected [512, 1]",
    ),
    "fp8 per row": (
        "fp8-tensor-static",
        put(f"{UP}.weight_scale", lambda s: s.expand(512)),
        "has shape [512], expected [] or [1]",
    ),
    "blocks of 64": (
        "fp8-block",
        put(f"{UP}.weight_scale_inv", lambda s: s.repeat(2, 2)),
        f"{UP}.weight, fp8 (fp8, blocks of 128x128)",
        "weight_scale_inv has shape [8, 4], expected [4, 2]",
    ),
    "e5m2 weights": (
        "fp8-channel",
        put(f"{UP}.weight", lambda w: w.float().to(torch.float8_e5m2)),
        "stored as F8_E5M2, supported: F8_E4M3",
    ),
    "int8 weights": (
        "fp8-channel",
        put(f"{UP}.weight", lambda w: w.float().to(torch.int8)),
        "stored as I8, supported: F8_E4M3",
    ),
    "plain weights with a scale": (
        "fp8-channel",
        put(f"{UP}.weight", lambda w: w.float()),
        "stored as F32, supported: F8_E4M3",
    ),
    "a plain weight beside it": (
        "gptq-128",
        add(f"{UP}.weight", torch.zeros(64).int()),
        f"stored quantised (qweight) and as {UP}.weight beside it: one of them is wrong",
    ),
    "two scales": (
        "fp8-block",
        add(f"{UP}.weight_scale", torch.ones(3).to(torch.uint8)),
        "has both weight_scale_inv and weight_scale: one of them is wrong",
    ),
    "whole scales": (
        "int4-32",
        put(f"{UP}.weight_scale", lambda s: s.int()),
        "weight_scale is stored as I32, supported: F32, F16",
    ),
    "int4 without scale": ("int4-32", drop(f"{DOWN}.weight_scale"), f"{DOWN}.weight, int4", "has no weight_scale"),
    "int4 without shape": ("int4-32", drop(f"{DOWN}.weight_shape"), "has no weight_shape"),
    "another group": ("int4-32", put(f"{DOWN}.weight_scale", lambda s: s[:, ::2]), "has shape [256, 8], expected [256, 16]"),
    "int4 without zeros": ("int4-64-zeros", drop(f"{UP}.weight_zero_point"), "has no weight_zero_point"),
    "zeros of int8": (
        "int4-64-zeros",
        put(f"{UP}.weight_zero_point", lambda z: z.to(torch.int8)),
        "zero_point is stored as I8",
    ),
    "zeros of other groups": (
        "int4-64-zeros",
        put(f"{UP}.weight_zero_point", lambda z: z[:, :2]),
        "has shape [64, 2], expected [64, 4]",
    ),
    "zeros of symmetric weights": (
        "int4-64-zeros",
        lambda tensors: None,
        "has weight_zero_point, but quantization_config says that the weights are symmetric",
    ),
    "order unsaid": (
        "int4-64-zeros",
        add(f"{UP}.weight_g_idx", torch.zeros(256).int()),
        "has weight_g_idx, but quantization_config",
    ),
    "no order": ("int4-order", drop(f"{UP}.weight_g_idx"), "has no weight_g_idx"),
    "gptq without scales": ("gptq-128", drop(f"{UP}.scales"), f"{UP}.weight, int4 (gptq, groups of 128", "has no scales"),
    "gptq without zeros": ("gptq-128", drop(f"{UP}.qzeros"), "has no qzeros"),
    "gptq zeros": ("gptq-128", put(f"{UP}.qzeros", lambda z: z[:, :1]), "qzeros has shape [2, 1], expected [2, 64]"),
    "gptq order": ("gptq-order", drop(f"{UP}.g_idx"), "has no g_idx"),
    "gptq scales": (
        "gptq-channel",
        put(f"{UP}.scales", lambda s: s.repeat(2, 1)),
        "scales has shape [2, 512], expected [1, 512]",
    ),
    "awq without scales": ("awq-128", drop(f"{UP}.scales"), f"{UP}.weight, int4 (awq, groups of 128", "has no scales"),
    "awq zeros": ("awq-128", put(f"{UP}.qzeros", lambda z: z.t().contiguous()), "qzeros has shape [64, 2], expected [2, 64]"),
    "awq bytes": ("awq-128", put(f"{UP}.qweight", lambda q: q.view(torch.uint8)), "qweight is stored as U8, supported: I32"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers(case, copy):
    name, change, *named = HEADERS[case]
    directory = copy(name)
    rewrite_tensors(directory, change)
    if case == "zeros of symmetric weights":
        rewrite_config(directory, quantization_config=changed(name, weights={"symmetric": True}))
    for command in (check_source, inspect_checkpoint, load_model):  # before torch is needed, and again
        with pytest.raises(ValueError, match=r"proj\.weight, ") as caught:
            command(directory)
        assert all(words in str(caught.value) for words in named), caught.value
        assert "\n" not in str(caught.value)


CONTENTS = {
    "nan scale": ("fp8-channel", put(f"{UP}.weight_scale", set_first(NAN)), f"{UP}.weight_scale holds NaN or infinite"),
    "infinite scale": ("gptq-128", put(f"{DOWN}.scales", set_first(float("inf"))), f"{DOWN}.scales holds NaN or infinite"),
    "nan block": ("fp8-block", put(f"{UP}.weight_scale_inv", set_first(NAN)), f"{UP}.weight_scale_inv holds NaN"),
    "nan in awq": ("awq-64", put(f"{UP}.scales", set_first(NAN)), f"{UP}.scales holds NaN"),
    "nan in int4": ("int4-32", put(f"{UP}.weight_scale", set_first(NAN)), f"{UP}.weight_scale holds NaN"),
    "nan weight": (
        "fp8-channel",
        put(f"{UP}.weight", lambda w: torch.cat([w[:-1].float(), torch.full((1, 256), NAN)]).to(w.dtype)),
        f"{UP}.weight holds NaN",
    ),
    "zero point 16 or 0": (
        "gptq-128",
        put(f"{UP}.qzeros", set_first(0x0000F000)),
        "qzeros holds the zero point 15, which stands for 16 or for 0",
    ),
    "a group too many": (
        "gptq-order",
        put(f"{UP}.g_idx", set_first(4)),
        "g_idx names groups 0 to 4, but there are scales of 4",
    ),
    "a negative group": ("int4-order", put(f"{UP}.weight_g_idx", set_first(-1)), "g_idx names groups -1 to 3"),
    "disorder": ("gptq-128", put(f"{UP}.g_idx", lambda g: g.flip(0)), "g_idx does not count groups in order, but"),
    "groups from 1": ("gptq-128", put(f"{UP}.g_idx", lambda g: g + 1), "g_idx does not count groups in order, but"),
    "another shape": (
        "int4-32",
        put(f"{UP}.weight_shape", set_first(500)),
        "weight_shape says [500, 256], the packed numbers make",
    ),
}


@pytest.mark.filterwarnings("ignore:weights in")
@pytest.mark.parametrize("case", CONTENTS)
def test_contents(case, copy):
    name, change, named = CONTENTS[case]
    directory = copy(name)
    rewrite_tensors(directory, change)
    with pytest.raises(ValueError, match="proj") as caught, pytest.warns(UserWarning, match="dequantised"):
        load_model(directory)
    assert named in str(caught.value)
    if "holds NaN" in named:
        assert load_model(directory, allow_nonfinite=True) is not None


STRAY = "belongs to no weight in {} .*: formats are mixed, which is not supported, or a tensor of that weight is missing"


@pytest.mark.parametrize(
    ("name", "change", "loading", "converting"),
    [
        ("int4-32", add(f"{UP}.qweight", torch.zeros(4, 4).int()), STRAY.format("int4"), "has no place for .*up_proj.qweight"),
        ("fp8-channel", add(f"{UP}.k_scale", torch.ones(1)), "has no place for .*k_scale", "has no place for .*k_scale"),
        ("gptq-128", drop(f"{UP}.qweight"), STRAY.format("int4"), f"has no tensor {UP}.weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:weights in")
def test_tensors_of_another_format(name, change, loading, converting, copy):
    directory = copy(name)
    rewrite_tensors(directory, change)
    with pytest.raises(ValueError, match=loading):
        load_model(directory)
    with pytest.raises(ValueError, match=converting):
        convert(directory, directory / "out", "ladder")


def test_a_config_that_promises_what_is_not_there(copy):
    directory = copy("gptq-128")
    rewrite_config(directory, quantization_config=changed("int4-128"))
    with pytest.raises(ValueError, match=r"holds no weight_packed of int4 .* remove quantization_config"):
        load_model(directory)


@pytest.mark.parametrize(
    ("name", "sizes", "tp", "named"),
    [
        ("int4-128", {"intermediate_size": 384}, 2, "down_proj.weight, int4 .* columns 0 to 192 of 384 .* groups of 128: .*"),
        ("gptq-128", {"intermediate_size": 384}, 2, "columns 0 to 192 of 384 are no whole number of groups of 128"),
        ("awq-64", {"intermediate_size": 384}, 4, "columns 0 to 96 of 384 are no whole number of groups of 64"),
        (
            "fp8-block",
            {"intermediate_size": 384},
            2,
            "columns 0 to 192 of 384 are no whole number of blocks of 128",
        ),
        (
            "fp8-ct-block",
            {"head_dim": 64},
            4,
            "rows 0 to 64 of 128 are no whole number of blocks of 128: use fewer ranks",
        ),
        ("int4-channel", {"intermediate_size": 408}, 2, "columns 0 to 204 of 408 are no whole number of int32 with 8 columns"),
        ("gptq-channel", {"intermediate_size": 408}, 2, "columns 0 to 204 of 408 are no whole number of int32 with 8 columns"),
        ("awq-channel", {"intermediate_size": 408}, 2, "rows 0 to 204 of 408 are no whole number of int32 with 8 rows"),
    ],
)
def test_ranks_that_would_cut_a_group(name, sizes, tp, named, tmp_path):
    write(tmp_path, name, layers=1, **sizes)
    check_source(tmp_path, tp=1)
    with pytest.raises(ValueError, match=named):
        check_source(tmp_path, tp=tp)
    assert "no whole number of" in inspect_checkpoint(tmp_path)["ranks"][tp]["refused"]


@pytest.mark.parametrize("name", ["int4-order", "gptq-order"])
def test_act_order_needs_no_border(name, tmp_path):
    """Any rank may need any group, so it keeps all scales and only its columns of the rest: 96 of them hold groups of 64 in part."""
    write(tmp_path, name, layers=1, intermediate_size=384)
    check_source(tmp_path, tp=4)
    found = check_source(tmp_path)
    assert found.rank_bytes(found.shape, 4, 0, 4)[0] > found.rank_bytes(found.shape, 1, 0, 4)[0] / 4


def test_training_needs_plain_weights(copy, tmp_path):
    from ladder_residual.adapt.preflight import check_models
    from ladder_residual.adapt.settings import from_mapping

    directory = copy("awq-64")
    settings = from_mapping({"student": str(directory), "method": "sft", "out": str(tmp_path / "out")}, "test")
    with pytest.raises(ValueError, match="is quantised .* adapt the model it was quantised from"):
        check_models(settings)
