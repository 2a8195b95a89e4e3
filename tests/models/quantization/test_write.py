"""``ladder convert --quantize``: what is written, and who can read it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ladder_residual import rewire
from ladder_residual.models.convert import convert, describe
from ladder_residual.models.inspect import inspect_checkpoint
from ladder_residual.models.loading import load_model
from ladder_residual.models.quantization.checkpoint import open_checkpoint
from ladder_residual.models.quantization.rounding import Fp8
from tests.models.quantization.written import e4m3, is_projection, rewrite_tensors
from tests.ranks import run_on_ranks
from tests.tiny_models import FAMILY_NAMES, random_ids, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:weights in fp8")
EVERY = sorted({e4m3(byte) for byte in range(256) if byte & 127 != 127})  # E4M3 can say these numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_number_is_the_nearest_one(dtype):
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)).mul_(1e-3).to(dtype)
    weight[2] = 0
    numbers, scale = Fp8().round("w", weight, dtype)
    assert scale.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    for row, its, factor in zip(weight.tolist(), numbers.float().tolist(), scale.view(-1).tolist(), strict=True):
        top = max(map(abs, row))
        assert factor == pytest.approx(top / 448 if top else 1, rel=2**-8)  # bfloat16 keeps 8 bits of it
        for value, number in zip(row, its, strict=True):
            assert number in EVERY
            assert abs(number - value / factor) <= min(abs(other - value / factor) for other in EVERY) + 1e-5


@pytest.mark.parametrize("tiny", [1e-39, 1e-44], ids=["no bfloat16 scale", "no scale at all"])
def test_a_row_whose_scale_rounds_to_zero_is_zero(tiny):
    weight = torch.ones(3, 8, dtype=torch.float32 if tiny < 1e-40 else torch.bfloat16)
    weight[1] = tiny
    numbers, scale = Fp8().round("w", weight, weight.dtype)
    dense = numbers.float() * scale.float()
    assert (scale > 0).all()
    assert (dense[1] == 0).all()
    torch.testing.assert_close(dense[::2], weight[::2].float(), rtol=2**-4, atol=0)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_loads_again(family, tmp_path):
    rewire(tiny_model(family), "ladder").save_pretrained(tmp_path / "plain")
    done = convert(tmp_path / "plain", tmp_path / "fp8", "ladder:last-half", quantize="fp8")
    assert (done.placed, done.after.spec) == ("quantised", "ladder:2-3")
    checkpoint = open_checkpoint(tmp_path / "fp8")
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    assert set(checkpoint.weights) == {
        name for name in stored if ".layers." in name and is_matrix_of_a_projection(name, stored)
    }
    for name, tensor in stored.items():
        found = checkpoint.read(name)
        if name in checkpoint.weights:
            largest = tensor.abs().amax(1, keepdim=True)
            assert ((found - tensor).abs() <= tensor.abs() / 16 + largest / 448 / 512).all(), name
        else:
            assert torch.equal(found, tensor)
    with torch.no_grad():
        expected = load_model(tmp_path / "plain", wiring="ladder:last-half")(random_ids()).logits
        found = load_model(tmp_path / "fp8")(random_ids()).logits
    assert 0 < (found - expected).norm() / expected.norm() < 0.3


def is_matrix_of_a_projection(name, stored):
    other = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "c_fc", "c_proj")
    return stored[name].dim() == 2 and (is_projection(name) or name.split(".")[-2] in other)


def tokens_of(world, root):
    return load_model(root, world).generate(random_ids(), max_new_tokens=8, do_sample=False).tolist()


def test_what_is_written(tmp_path, capsys):
    tiny_model("qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "plain", max_shard_size="100KB")
    before = (tmp_path / "plain" / "model.safetensors.index.json").read_text()
    done = convert(tmp_path / "plain", tmp_path / "fp8", quantize="fp8")
    assert (done.before.spec, done.after.spec) == ("standard", "standard")
    describe(done, print)
    assert "(fp8 per channel, 0.3 -> 0.2 MiB)" in capsys.readouterr().out
    written = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    files = {name: file for file in done.weights for name in load_file(tmp_path / "fp8" / file)}
    assert written["weight_map"] == files
    tensors = {name: t for file in done.weights for name, t in load_file(tmp_path / "fp8" / file).items()}
    assert written["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values()) == done.quantised_bytes[1]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (tensors[name].dtype, tensors[name + "_scale"].dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert tensors[name + "_scale"].shape == (64, 1)
    assert (tmp_path / "plain" / "model.safetensors.index.json").read_text() == before
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"], config["ignore"]) == (
        "compressed-tensors",
        "float-quantized",
        ["lm_head"],
    )
    assert inspect_checkpoint(tmp_path / "fp8")["quantization"]["activations"] == "dynamic"
    expected = load_model(tmp_path / "fp8").generate(random_ids(), max_new_tokens=8, do_sample=False).tolist()
    assert run_on_ranks(2, tokens_of, str(tmp_path / "fp8")) == [expected] * 2


def test_int4_in_the_largest_groups_that_fit(tmp_path, capsys):
    tiny_model("qwen3", intermediate_size=128, num_attention_heads=8).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    done = convert(tmp_path / "plain", tmp_path / "int4", "ladder", quantize="int4")
    describe(done, print)
    assert "(int4 in groups of 64, 0.4 -> 0.1 MiB)" in capsys.readouterr().out
    stored, before = (load_file(tmp_path / which / "model.safetensors") for which in ("int4", "plain"))
    module = "model.layers.0.mlp.down_proj"
    assert {
        name.rpartition(".")[2]: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items() if module in name
    } == {
        "weight_packed": (torch.int32, (64, 16)),
        "weight_scale": (torch.bfloat16, (64, 2)),
        "weight_shape": (torch.int64, (2,)),
    }
    checkpoint = open_checkpoint(tmp_path / "int4")
    assert checkpoint.spec.describe() == "int4 (compressed-tensors, groups of 64)"
    for name in checkpoint.weights:
        weight = before[name].float()
        assert (checkpoint.read(name) - weight).norm() < 0.15 * weight.norm(), name
    expected = load_model(tmp_path / "int4").generate(random_ids(), max_new_tokens=8, do_sample=False).tolist()
    assert run_on_ranks(2, tokens_of, str(tmp_path / "int4")) == [expected] * 2


def test_columns_that_no_group_divides_are_refused(tmp_path):
    tiny_model("qwen2_moe").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"shared_expert.down_proj.weight has 48 columns, .* use --quantize fp8"):
        convert(tmp_path / "plain", tmp_path / "int4", quantize="int4")


def test_routers_stay_plain(tmp_path):
    tiny_model("qwen2_moe").save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "fp8", quantize="fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", r"re:.*\.gate$", r"re:.*\.shared_expert_gate$"]


def test_computed_tensors_of_any_dtype_go_along(tmp_path):
    """Older gpt_neox checkpoints store their causal mask, in whole numbers or bits."""
    tiny_model("gpt_neox").save_pretrained(tmp_path / "plain")
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    buffers = {}
    for layer in range(4):
        prefix = f"gpt_neox.layers.{layer}.attention."
        buffers[prefix + "bias"] = torch.ones(1, 1, 8, 8).tril().bool()
        buffers[prefix + "masked_bias"] = torch.tensor(-torch.inf)
    save_file(stored | buffers, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    convert(tmp_path / "plain", tmp_path / "fp8", "ladder", quantize="fp8")
    written = load_file(tmp_path / "fp8" / "model.safetensors")
    for name, tensor in buffers.items():
        assert (written[name].dtype, written[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(written[name], tensor)
    load_model(tmp_path / "fp8")(random_ids())


def test_a_head_of_no_numbers_is_no_buffer(tmp_path):
    tiny_model("gpt_neox", tie_word_embeddings=False).save_pretrained(tmp_path / "plain")
    rewrite_tensors(tmp_path / "plain", lambda tensors: tensors["embed_out.weight"].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"embed_out\.weight holds NaN"):
        convert(tmp_path / "plain", tmp_path / "fp8", quantize="fp8")


def test_it_is_rewired_later_without_a_byte_changed(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "fp8", quantize="fp8")
    done = convert(tmp_path / "fp8", tmp_path / "ladder", "ladder")
    assert done.placed == "linked"
    assert (tmp_path / "ladder" / "model.safetensors").samefile(tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(ValueError, match="is quantised already: leave out --quantize"):
        convert(tmp_path / "fp8", tmp_path / "again", quantize="fp8")


def test_a_bad_weight_leaves_nothing_behind(tmp_path):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinite"):
        convert(tmp_path / "plain", tmp_path / "fp8", quantize="fp8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain"]
    with pytest.raises(ValueError, match="nothing to convert: give a wiring"):
        convert(tmp_path / "plain", tmp_path / "fp8")


def test_a_weight_beyond_float32_is_refused(tmp_path):
    tiny_model("llama").double().save_pretrained(tmp_path / "plain")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite_tensors(tmp_path / "plain", lambda tensors: tensors[name].view(-1)[:1].fill_(1e300))
    with pytest.raises(ValueError, match=f"{name} overflows as torch.float32"):
        convert(tmp_path / "plain", tmp_path / "fp8", quantize="fp8")
    assert not (tmp_path / "fp8").exists()


@pytest.mark.parametrize("wiring", ["standard", "ladder"])
@pytest.mark.parametrize(
    ("family", "quantize"), [("llama", "fp8"), ("mixtral", "fp8"), ("qwen3_moe", "fp8"), ("llama", "int4")]
)
def test_transformers_loads_it_with_the_library_of_the_format(family, quantize, wiring, tmp_path):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    tiny_model(family).save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "out", wiring, quantize=quantize)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    found = dict(theirs.named_parameters())
    for name, tensor in load_model(tmp_path / "out").named_parameters():
        rounding = 2**-8 if "experts" in name else 1e-6  # transformers has experts in bfloat16
        torch.testing.assert_close(found[name].float(), tensor, rtol=rounding, atol=0, msg=name)


def test_the_library_quantises_alike(tmp_path):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig

    tiny_model("qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "fp8", quantize="fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig(**config).config_groups["group_0"]
    tool = compressors.BaseCompressor.get_value_from_registry(config["format"])
    plain, written = (load_file(tmp_path / which / "model.safetensors") for which in ("plain", "fp8"))
    for name in [name for name in plain if name + "_scale" in written]:
        # in float32, where the library divides in the weight's own dtype
        state = {"weight": plain[name].float(), "weight_scale": written[name + "_scale"].float()}
        assert torch.equal(tool.compress(state, scheme)["weight"].float(), written[name].float()), name
