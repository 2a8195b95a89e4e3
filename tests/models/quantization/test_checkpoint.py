"""Reading quantised checkpoints: what they stand for is known from how they were written."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from ladder_residual.models.checkpoint_reader import Checkpoint
from ladder_residual.models.chunks import local_part
from ladder_residual.models.convert import convert
from ladder_residual.models.inspect import inspect_checkpoint
from ladder_residual.models.loading import load_model
from ladder_residual.models.preflight import check_source
from ladder_residual.models.sharding import shard_of
from tests.models.quantization.written import FORMATS, awq, fp8_channel, gptq, rewrite_tensors, write, write_plain
from tests.ranks import run_on_ranks
from tests.tiny_models import random_ids


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantised")
    for name in FORMATS:
        dense = write(root / name, name)
        write_plain(root / f"{name}-plain", root / name, dense)
    return root


def quietly(source, *rest, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return load_model(source, *rest, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_what_was_written(name, checkpoints):
    with pytest.warns(UserWarning, match="are dequantised to float32: .* MiB on a rank, .* MiB as stored"):
        found = load_model(checkpoints / name)
    expected = dict(load_model(checkpoints / f"{name}-plain").named_parameters())
    for parameter, tensor in found.named_parameters():
        torch.testing.assert_close(tensor, expected[parameter], rtol=0, atol=0, msg=parameter)
    assert getattr(found.config, "quantization_config", None) is None


def shards(world, root, names):
    """Whether every shard is a part of the whole weight, and greedy tokens of a batch."""
    found = {}
    for name in names:
        whole = dict(quietly(f"{root}/{name}-plain").named_parameters())
        model = quietly(f"{root}/{name}", world)
        different = [
            parameter
            for parameter, tensor in model.named_parameters()
            if not torch.equal(tensor, local_part(whole[parameter], model.shard_specs[parameter]))
        ]
        tokens = model.generate(random_ids(), max_new_tokens=8, do_sample=False).tolist()
        found[name] = different, tokens
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_their_shards(ranks, checkpoints):
    tokens = {
        name: quietly(checkpoints / name).generate(random_ids(), max_new_tokens=8, do_sample=False).tolist() for name in FORMATS
    }
    for found in run_on_ranks(ranks, shards, str(checkpoints), list(FORMATS)):
        assert found == {name: ([], tokens[name]) for name in FORMATS}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "phi3", "qwen3"])
@pytest.mark.parametrize("name", ["fp8-channel", "int4-32", "gptq-order", "awq-64"])
def test_other_families(name, family, tmp_path):
    sizes = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    dense = write(tmp_path / "quantised", name, family, layers=1, **sizes)
    write_plain(tmp_path / "plain", tmp_path / "quantised", dense)
    with torch.no_grad():
        found = quietly(tmp_path / "quantised")(random_ids()).logits
        assert torch.equal(found, load_model(tmp_path / "plain")(random_ids()).logits)


def experts(world, root):
    model = quietly(root, world)
    return model.generate(random_ids(), max_new_tokens=6, do_sample=False).tolist()


def test_experts_on_two_ranks(tmp_path):
    write(tmp_path, "int4-32", "mixtral", layers=2)
    expected = quietly(tmp_path).generate(random_ids(), max_new_tokens=6, do_sample=False).tolist()
    assert run_on_ranks(2, experts, str(tmp_path)) == [expected] * 2


def test_the_line_names_format_memory_and_activations(checkpoints):
    with pytest.warns(UserWarning, match="dequantised") as caught:
        load_model(checkpoints / "fp8-channel", dtype="bfloat16")
    assert [str(warning.message) for warning in caught] == [
        "weights in fp8 (compressed-tensors, a scale per channel) are dequantised to bfloat16: 3.1 MiB on a rank, 1.6 MiB as stored, "
        "and activations are bfloat16 (the checkpoint asks for dynamic fp8)"
    ]


@pytest.mark.parametrize(
    ("name", "method", "bits", "group"), [("fp8-block", "fp8", 8, None), ("int4-64-zeros", "compressed-tensors", 4, 64)]
)
def test_inspect_counts_both_memories(name, method, bits, group, checkpoints):
    found = inspect_checkpoint(checkpoints / name)
    said = found["quantization"]
    assert (said["method"], said["bits"], said["group"]) == (method, bits, group)
    stored = sum(t.numel() * t.element_size() for t in load_file(checkpoints / name / "model.safetensors").values())
    loaded = sum(t.numel() * t.element_size() for t in load_file(checkpoints / f"{name}-plain" / "model.safetensors").values())
    assert found["ranks"][1]["stored_bytes"] == stored
    assert found["ranks"][1]["weight_bytes"] == loaded
    halves = [
        check_source(checkpoints / name).rank_bytes(check_source(checkpoints / name).shape, 2, rank, 4) for rank in (0, 1)
    ]
    assert stored < sum(half[0] for half in halves) < 1.05 * stored  # norms are on both
    assert inspect_checkpoint(checkpoints / f"{name}-plain")["quantization"] is None


@pytest.mark.parametrize("name", ["fp8-block", "int4-order", "gptq-128", "awq-64"])
def test_convert_leaves_weights_as_they_are(name, checkpoints, tmp_path):
    convert(checkpoints / name, tmp_path / "ladder", "ladder:last-half", copy=True)
    assert (tmp_path / "ladder" / "model.safetensors").read_bytes() == (checkpoints / name / "model.safetensors").read_bytes()
    before, after = (json.loads((path / "config.json").read_text()) for path in (checkpoints / name, tmp_path / "ladder"))
    assert after["quantization_config"] == before["quantization_config"]
    with torch.no_grad():
        found = quietly(tmp_path / "ladder")(random_ids()).logits
        expected = load_model(checkpoints / f"{name}-plain", wiring="ladder:last-half")(random_ids()).logits
    assert torch.equal(found, expected)
    convert(tmp_path / "ladder", tmp_path / "back", "standard")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == before


def test_a_head_of_fp8(tmp_path):
    """What is quantised is seen in the tensors: a head may be, although most checkpoints leave it alone."""
    dense = write(tmp_path / "q", "fp8-channel")
    parts, dense["lm_head.weight"] = fp8_channel(dense["lm_head.weight"])
    rewrite_tensors(tmp_path / "q", lambda tensors: tensors.update({f"lm_head.{part}": t for part, t in parts.items()}))
    write_plain(tmp_path / "plain", tmp_path / "q", dense)
    with torch.no_grad():
        assert torch.equal(quietly(tmp_path / "q")(random_ids()).logits, load_model(tmp_path / "plain")(random_ids()).logits)
    found, expected = (inspect_checkpoint(tmp_path / which)["ranks"][2]["weight_bytes"] for which in ("q", "plain"))
    assert found == expected


HEADS = {"fp8-channel": fp8_channel, "gptq-128": lambda w: gptq(w, 128), "awq-64": lambda w: awq(w, 64)}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("read", [inspect_checkpoint, load_model])
@pytest.mark.filterwarnings("ignore:weights in")
def test_a_quantised_head_is_not_the_embedding_it_is_tied_to(name, read, tmp_path):
    write(tmp_path, name, tie_word_embeddings=True, vocab_size=128)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    parts, _ = HEADS[name](table)
    rewrite_tensors(tmp_path, lambda tensors: tensors.update({f"lm_head.{part}": t for part, t in parts.items()}))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, but config\.json says"):
        read(tmp_path)


def test_a_bias_of_zeros_beside_each_weight_is_left_out(tmp_path):
    """AutoGPTQ wrote one, also where the model has none."""
    dense = write(tmp_path / "q", "gptq-128")
    write_plain(tmp_path / "q-plain", tmp_path / "q", dense)
    modules = [name.removesuffix(".qweight") for name in load_file(tmp_path / "q" / "model.safetensors") if "qweight" in name]
    rows = {module: len(dense[f"{module}.weight"]) for module in modules}

    def add(value, *which):
        biases = {f"{module}.bias": torch.full((rows[module],), value).half() for module in which or modules}
        rewrite_tensors(tmp_path / "q", lambda tensors: tensors.update(biases))

    add(0.0)
    expected = load_model(tmp_path / "q-plain").generate(random_ids(), max_new_tokens=8, do_sample=False).tolist()
    assert [found["q"] for found in run_on_ranks(2, shards, str(tmp_path), ["q"])] == [([], expected)] * 2
    with torch.no_grad():
        assert torch.equal(quietly(tmp_path / "q")(random_ids()).logits, load_model(tmp_path / "q-plain")(random_ids()).logits)
    assert convert(tmp_path / "q", tmp_path / "ladder", "ladder").placed == "linked"
    for value in (1e-3, float("nan")):
        add(value, "model.layers.1.mlp.down_proj")
        with pytest.raises(ValueError, match=r"holds 1 tensors .* no place for \(model\.layers\.1\.mlp\.down_proj\.bias\)"):
            quietly(tmp_path / "q")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_no_more_than_it_is_said_to_hold(name, rank, checkpoints, monkeypatch):
    found = check_source(checkpoints / name, copies=True)
    stored, _ = found.rank_bytes(found.shape, 2, rank, 4)
    read = []
    plainly = Checkpoint.read_stored

    def counted(self, *arguments):
        read.append(plainly(self, *arguments))
        return read[-1]

    monkeypatch.setattr(Checkpoint, "read_stored", counted)
    for tensor, whole in found.stored_weights(found.shape).items():
        found.checkpoint.read(tensor, shard_of(tensor, whole, found.shape, 2, rank))
    assert sum(tensor.untyped_storage().nbytes() for tensor in read) == stored
