"""LoRA on a frozen quantised base: what is held, trained, written and read again."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ladder_residual.adapt.build import with_lora
from ladder_residual.adapt.preflight import check_models, check_settings
from ladder_residual.adapt.run import adapt
from ladder_residual.distributed.world import World
from ladder_residual.evaluate.plan import check_models as check_evaluated
from ladder_residual.models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ladder_residual.models.convert import convert
from ladder_residual.models.inspect import inspect_checkpoint
from ladder_residual.models.loading import load_model
from ladder_residual.models.preflight import check_source
from ladder_residual.models.quantization.linear import QuantizedLinear
from ladder_residual.report.results import files_of
from tests.models.quantization.written import FORMATS, write
from tests.ranks import run_on_ranks
from tests.tiny_adapt import losses, run, settings, stop_after_a_checkpoint

OPTIONS = dict(method="lora", lora_rank=4, learning_rate=2e-3, tokens=512 * 4, heldout=(), save_every=2)
pytestmark = pytest.mark.filterwarnings("ignore:weights in")


@pytest.fixture(scope="session")
def base(ground):
    """The converted model in fp8, an adapter trained on it, and the same model dequantised."""
    convert(ground / "half", ground / "fp8", quantize="fp8")
    with pytest.warns(UserWarning, match="are dequantised to float32"):
        plain = load_model(ground / "fp8", dtype="fp32")
    shutil.copytree(ground / "half", ground / "dequantised")
    tensors = {name: tensor.contiguous() for name, tensor in plain.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, ground / "dequantised" / "model.safetensors", metadata={"format": "pt"})
    before = (ground / "fp8" / "model.safetensors").read_bytes()
    run(ground, "adapter", student=str(ground / "fp8"), **OPTIONS)
    assert (ground / "fp8" / "model.safetensors").read_bytes() == before
    return ground


def logits(model):
    ids = torch.arange(3, 35).view(2, 16)
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("name", FORMATS)
def test_held_weights_compute_as_dequantised_ones(name, tmp_path):
    """Forward, and the gradient that reaches what lies before them; with a bias where the family has one."""
    write(tmp_path, name, family="qwen2" if name == "awq-64" else "llama")
    held, plain = load_model(tmp_path, dtype="fp32", keep_quantised=True), load_model(tmp_path, dtype="fp32")
    projections = [module for module in held.modules() if isinstance(module, QuantizedLinear)]
    assert len(projections) == 14
    assert not any("_proj.weight" in parameter for parameter, _ in held.named_parameters())
    stored = sum(part.nbytes for module in projections for part in module.parts.values())
    assert stored < 0.5 * sum(module.weight.nbytes for module in projections)
    gradients, outputs = [], []
    for model in (held, plain):
        model(torch.arange(3, 35).view(2, 16)).logits.square().sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
        outputs.append(logits(model))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(logits(held), logits(plain))


def test_experts_that_are_stacked_are_dequantised_and_said_to_be(tmp_path):
    write(tmp_path, "fp8-channel", family="mixtral")
    with pytest.warns(
        UserWarning, match="weights in fp8 .* of stacked experts, and are dequantised to float32: .* MiB as stored"
    ):
        held = load_model(tmp_path, dtype="fp32", keep_quantised=True)
    assert sum(isinstance(module, QuantizedLinear) for module in held.modules()) == 8
    assert torch.equal(logits(held), logits(load_model(tmp_path, dtype="fp32")))


def test_it_trains_as_on_the_dequantised_base(base):
    said = []
    adapt(settings(base, "note", student=str(base / "fp8"), **OPTIONS | dict(tokens=512, save_every=0)), World(), said.append)
    assert any("student  35 weights stay in fp8 (compressed-tensors, a scale per channel): " in line for line in said)
    assert said[-2:] == ["written as an adapter, because the base is quantised", f"written  {(base / 'note').resolve()}"]
    run(base, "twin", student=str(base / "dequantised"), merge=False, **OPTIONS)
    ours, theirs = losses(base, "adapter"), losses(base, "twin")
    assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=1e-5)
    assert ours[4] != ours[1]
    for name, tensor in load_file(base / "twin" / ADAPTER_WEIGHTS).items():
        torch.testing.assert_close(load_file(base / "adapter" / ADAPTER_WEIGHTS)[name], tensor, rtol=1e-3, atol=1e-5)


def test_peft_and_every_command_read_the_adapter(base, tmp_path):
    peft = pytest.importorskip("peft")
    fields = json.loads((base / "adapter" / ADAPTER_CONFIG).read_text())
    assert fields["base_model_name_or_path"] == str((base / "fp8").resolve())
    assert not (base / "adapter" / "config.json").exists()
    ours = load_model(base / "adapter", dtype="fp32")
    theirs = peft.PeftModel.from_pretrained(load_model(base / "fp8", dtype="fp32"), str(base / "adapter"))
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)
    assert (logits(ours) - logits(load_model(base / "fp8", dtype="fp32"))).abs().max() > 1e-3

    conversion = convert(base / "adapter", tmp_path / "merged")
    assert conversion.placed == "merged"
    merged = load_model(tmp_path / "merged", dtype="fp32")
    assert check_source(tmp_path / "merged").quantization is None
    assert torch.equal(logits(merged), logits(ours))
    again = convert(base / "adapter", tmp_path / "again", "standard", quantize="fp8")
    assert again.placed == "quantised"
    assert check_source(tmp_path / "again").quantization.describe() == "fp8 (compressed-tensors, a scale per channel)"
    difference = logits(load_model(tmp_path / "again", dtype="fp32", wiring="ladder:3-4")) - logits(ours)
    assert difference.abs().max() < 0.1 * logits(ours).abs().max()
    assert inspect_checkpoint(base / "adapter")["adapter"] == {"rank": 4, "base": str((base / "fp8").resolve())}
    for trained in (dict(student=str(base / "adapter")), dict(teacher=str(base / "adapter"), control=True)):
        with pytest.raises(ValueError, match=f"{base / 'adapter'} is an adapter: merge it into its base"):
            check_settings(settings(base, "again", **OPTIONS | trained))


def test_an_adapter_teaches_as_the_model_it_is_merged_into(base):
    convert(base / "adapter", base / "teacher")
    for name in ("adapter", "teacher"):
        run(base, f"taught-by-{name}", teacher=str(base / name), **OPTIONS | dict(tokens=512 * 2))
    assert losses(base, "taught-by-adapter") == pytest.approx(losses(base, "taught-by-teacher"), rel=1e-5)


def test_its_own_tokenizer_and_template_are_the_merged_models(base, tmp_path):
    adapter = shutil.copytree(base / "adapter", tmp_path / "adapter")
    own = json.loads((adapter / "tokenizer_config.json").read_text()) | {"chat_template": "mine"}
    (adapter / "tokenizer_config.json").write_text(json.dumps(own))
    fields = json.loads((adapter / ADAPTER_CONFIG).read_text())
    named = shutil.copytree(fields["base_model_name_or_path"], tmp_path / "named")
    (named / "chat_template.jinja").write_text("its base's")  # would count before the one in tokenizer_config.json
    (named / "LICENSE").write_text("terms")
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(fields | {"base_model_name_or_path": str(named)}))
    convert(adapter, tmp_path / "own")
    assert json.loads((tmp_path / "own" / "tokenizer_config.json").read_text())["chat_template"] == "mine"
    kept = {path.name for path in (tmp_path / "own").iterdir()}
    assert "LICENSE" in kept
    assert not kept & {"chat_template.jinja", "adapt.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS}

    (adapter / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (adapter / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ValueError, match="adapter/tokenizer.json is a link that leaves the checkpoint"):
        convert(adapter, tmp_path / "link")
    for path in adapter.glob("tokenizer*"):
        path.unlink()
    convert(adapter, tmp_path / "bases")
    assert (tmp_path / "bases" / "chat_template.jinja").read_text() == "its base's"
    assert (tmp_path / "bases" / "tokenizer.json").read_bytes() == (named / "tokenizer.json").read_bytes()


def test_an_evaluation_needs_the_tokenizer_of_the_adapter(base, tmp_path):
    adapter = shutil.copytree(base / "adapter", tmp_path / "adapter")
    (adapter / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"{adapter} has no tokenizer"):
        check_evaluated(adapter, None, tp=1, wiring=None, dtype="auto", uneven=False)


def test_a_report_finds_the_result_of_its_run(base):
    assert files_of([base / "adapter"]) == [base / "adapter" / "adapt.json"]


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_of_the_head_or_the_embedding_are_refused(base, target):
    model = load_model(base / "half", dtype="fp32")
    with pytest.raises(ValueError, match=f"q_proj, {target} name the head or the embedding: name projections of the layers"):
        with_lora(model, settings(base, "refused", **OPTIONS | dict(lora_targets=("q_proj", target))))


def _logits_of_rank(world, source):
    return logits(load_model(source, world, dtype="fp32")).numpy()  # a tensor would be shared memory of a process that ends


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_their_part_of_it(base, ranks):
    whole = logits(load_model(base / "adapter", dtype="fp32"))
    for found in run_on_ranks(ranks, _logits_of_rank, base / "adapter"):
        torch.testing.assert_close(torch.from_numpy(found), whole, rtol=1e-4, atol=1e-4)


def _train(world, ground, name, changes):
    run(ground, name, world, **OPTIONS | changes)


def _stop(world, ground, name, changes):
    return stop_after_a_checkpoint(ground, name, world, **OPTIONS | changes)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_as_one_and_resume(base, parallel):
    changes = dict(student=str(base / "fp8"), parallel=parallel, micro_rows=2)
    assert run_on_ranks(2, _stop, base, f"adapter-{parallel}", changes) == ["stopped", "stopped"]
    saved = base / f"adapter-{parallel}.training" / "checkpoint-2"
    if parallel == "ddp":
        assert [path.name for path in saved.glob("*.safetensors")] == [ADAPTER_WEIGHTS]  # the base is not in it
        assert all(".lora_" in name for name in load_file(saved / ADAPTER_WEIGHTS))
    run_on_ranks(2, _train, base, f"adapter-{parallel}", changes)
    one, two = losses(base, "adapter"), losses(base, f"adapter-{parallel}")
    assert list(two.values()) == pytest.approx(list(one.values()), rel=2e-5)
    for name, tensor in load_file(base / f"adapter-{parallel}" / ADAPTER_WEIGHTS).items():
        torch.testing.assert_close(load_file(base / "adapter" / ADAPTER_WEIGHTS)[name], tensor, rtol=1e-3, atol=1e-5)


def test_one_process_resumes_exactly(base):
    options = OPTIONS | dict(student=str(base / "fp8"))
    assert stop_after_a_checkpoint(base, "adapter-broken", **options) == "stopped"
    run(base, "adapter-broken", merge=False, **options)  # only what is written may differ
    assert losses(base, "adapter-broken") == losses(base, "adapter")
    assert (base / "adapter-broken" / ADAPTER_WEIGHTS).read_bytes() == (base / "adapter" / ADAPTER_WEIGHTS).read_bytes()


@pytest.mark.parametrize("method", ["sft", "distill"])
def test_other_methods_are_refused(base, method):
    with pytest.raises(ValueError, match=rf"is quantised \(fp8 .* --method {method} changes every weight: use --method lora"):
        check_models(settings(base, "refused", student=str(base / "fp8"), **OPTIONS | dict(method=method)))
    control = dict(teacher=str(base / "fp8"), control=True, method="sft")
    with pytest.raises(ValueError, match="changes every weight"):
        check_models(settings(base, "refused", student=str(base / "half"), **OPTIONS | control))
    with pytest.raises(ValueError, match="merge = false keeps an adapter"):
        settings(base, "refused", **OPTIONS | dict(method=method, merge=False))


Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIGS = [
    ("peft_type", "IA3", "supported is LORA"),
    ("r", 0, "expected a whole number above 0"),
    ("lora_alpha", "x", "expected a number"),
    ("lora_alpha", float("nan"), "expected a number"),
    ("lora_alpha", 10**400, "expected a number up to 1000000"),
    ("lora_alpha", 1e308, "expected a number up to 1000000"),
    ("use_dora", True, "merge it with peft first"),
    ("init_lora_weights", "pissa_niter_4", "init_lora_weights is 'pissa_niter_4', .* changes the base's weights too"),
    ("init_lora_weights", ["gaussian"], "changes the base's weights too: merge it with peft first"),
    ("modules_to_save", ["lm_head"], "merge it with peft first"),
    ("rank_pattern", {"q_proj": 8}, "merge it with peft first"),
    ("bias", "all", "supported is none"),
    ("base_model_name_or_path", "no/where/at/all", "no checkpoint directory"),
    ("base_model_name_or_path", "a" * 300, "base_model_name_or_path: "),
    ("base_model_name_or_path", "a" * 5000, "write the checkpoint it belongs to there"),
]
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
TENSORS = {
    "one side": (lambda t: t.pop(A), "and not the other matrix"),
    "rank": (lambda t: t.update({A: torch.zeros(5, 64)}), "expected a matrix of rank 4"),
    "whole numbers": (lambda t: t.update({A: torch.zeros(4, 64).int()}), r"I32 \[4, 64\]"),
    "float8": (
        lambda t: t.update({A: torch.zeros(4, 64).to(torch.float8_e4m3fn)}),
        r"F8_E4M3 \[4, 64\], .* F64, F32, F16, BF16",
    ),
    "shape": (lambda t: t.update({A: torch.zeros(4, 60)}), r"make \[64, 60\], its base has \[64, 64\]"),
    "another kind": (
        lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(64)}),
        "is no lora_A.weight or lora_B.weight",
    ),
    "nothing": (lambda t: t.clear(), "holds no matrices"),
}
BEYOND_HEADERS = {  # and the configs: what shows only once the model is built and the numbers are read
    "nan": (lambda t: t[A].fill_(float("nan")), "lora_A.weight holds NaN"),
    "overflow": (
        lambda t: (t[A].fill_(1e30), t[B].fill_(1e30)),
        "q_proj.weight with this adapter added holds NaN or infinite numbers",
    ),
    "elsewhere": (
        lambda t: t.update({f"{Q}x.lora_{s}.weight": torch.zeros(*((4, 64) if s == "A" else (64, 4))) for s in "AB"}),
        "which its base model does not have",
    ),
}


def changed(adapter, copy, change):
    """A copy of an adapter with other matrices."""
    shutil.copytree(adapter, copy)
    tensors = load_file(copy / ADAPTER_WEIGHTS)
    change(tensors)
    save_file(tensors, copy / ADAPTER_WEIGHTS)
    return copy


def refused(copy, tmp_path, named, *commands):
    for command in (load_model, lambda source: convert(source, tmp_path / "out"), *commands):
        with pytest.raises(ValueError, match=named) as caught:
            command(copy)
        assert "\n" not in str(caught.value)
        assert str(copy) in str(caught.value)
        assert len(str(caught.value)) < 400 + 2 * len(str(copy))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("field", "value", "named"), CONFIGS)
def test_bad_configs(base, field, value, named, tmp_path):
    copy = shutil.copytree(base / "adapter", tmp_path / "copy")
    fields = json.loads((copy / ADAPTER_CONFIG).read_text()) | {field: value}
    (copy / ADAPTER_CONFIG).write_text(json.dumps(fields))
    refused(copy, tmp_path, named, inspect_checkpoint)


@pytest.mark.parametrize("case", [*TENSORS, "cut short", "no file"])
def test_bad_headers(base, case, tmp_path):
    change, named = TENSORS.get(case, (lambda t: None, "has no adapter_model.safetensors"))
    copy = changed(base / "adapter", tmp_path / "copy", change)
    if case == "cut short":
        (copy / ADAPTER_WEIGHTS).write_bytes((copy / ADAPTER_WEIGHTS).read_bytes()[:-9])
        named = "damaged or cut short"
    elif case == "no file":
        (copy / ADAPTER_WEIGHTS).unlink()
    refused(copy, tmp_path, named, inspect_checkpoint)


@pytest.mark.parametrize("case", BEYOND_HEADERS)
def test_bad_numbers_and_names(base, case, tmp_path):
    change, named = BEYOND_HEADERS[case]
    refused(changed(base / "adapter", tmp_path / "copy", change), tmp_path, named)


@pytest.mark.parametrize("case", ["nan", "overflow"])
def test_numbers_that_are_not_finite_are_loaded_on_request(base, case, tmp_path):
    copy = changed(base / "adapter", tmp_path / "copy", BEYOND_HEADERS[case][0])
    loaded = load_model(copy, dtype="fp32", allow_nonfinite=True)
    assert not loaded.get_parameter("model.layers.0.self_attn.q_proj.weight").isfinite().all()


@pytest.mark.parametrize("init", [None, False, "gaussian", "mica"])
def test_matrices_that_leave_the_base_as_it_is_are_read_however_they_began(base, init, tmp_path):
    copy = shutil.copytree(base / "adapter", tmp_path / "copy")
    fields = json.loads((copy / ADAPTER_CONFIG).read_text()) | {"init_lora_weights": init}
    (copy / ADAPTER_CONFIG).write_text(json.dumps(fields))
    assert check_source(copy).adapter.rank == 4


def test_an_adapter_beside_a_checkpoint_is_refused(base, tmp_path):
    """It would be read without the adapter here, and with it by transformers."""
    copy = shutil.copytree(base / "half", tmp_path / "copy")
    shutil.copy(base / "adapter" / ADAPTER_CONFIG, copy)
    for command in (load_model, inspect_checkpoint, lambda source: convert(source, tmp_path / "out", "standard")):
        with pytest.raises(ValueError, match=r"adapter_config.json beside config.json, .* remove the one that is not meant"):
            command(copy)
