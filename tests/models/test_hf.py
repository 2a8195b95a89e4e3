"""What users of transformers expect to keep working on a rewired model."""

import json
import pickle

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ladder_residual import rewire
from ladder_residual.models.hf import set_reducer
from ladder_residual.models.hf_config import ladder_config_class
from tests.recorder import Recorder
from tests.tiny_models import clone, padded_inputs, random_ids, tiny_config, tiny_model

SPEC = "ladder:last-half"


@pytest.fixture(scope="module")
def ladder():
    return rewire(tiny_model("llama"), SPEC)


def padded_batch():
    return {**padded_inputs(3, 6), "pad_token_id": 0}


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "cache_implementation": "static"},
        {"do_sample": False, "use_cache": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    ],
    ids=["greedy", "static-cache", "no-cache", "beams", "sampling"],
)
def test_generate(ladder, options):
    torch.manual_seed(5)
    together = ladder.generate(**padded_batch(), max_new_tokens=8, **options)
    assert together.shape == (3, 14)
    if options.get("num_beams") or options["do_sample"]:
        return
    # Greedy: every row as if it were alone and unpadded, whatever the cache.
    batch = padded_batch()
    for row in range(3):
        real = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
        alone = ladder.generate(real, attention_mask=torch.ones_like(real), pad_token_id=0, max_new_tokens=8, do_sample=False)
        assert together[row, 6:].tolist() == alone[0, real.shape[1] :].tolist()


@pytest.mark.parametrize(
    "options", [{"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 20, "temperature": 0.8}]
)
def test_beams_and_samples_equal_transformers(options):
    """With the standard wiring: token for token what transformers' own class gives; with ladder: with and without a cache."""
    model = tiny_model("llama")
    for first, second, more in (
        (model, rewire(clone(model), "standard"), {}),
        (*[rewire(clone(model), SPEC)] * 2, {"use_cache": False}),
    ):
        tokens = []
        for which, extra in ((first, {}), (second, more)):
            torch.manual_seed(5)
            tokens.append(which.generate(**padded_batch(), max_new_tokens=8, **options, **extra))
        assert torch.equal(*tokens)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
@torch.no_grad()  # torch has no backward of flex attention on CPU
def test_attention_implementations_agree(implementation):
    model = rewire(tiny_model("llama"), SPEC)
    expected = model(random_ids()).logits
    model.set_attn_implementation(implementation)
    torch.testing.assert_close(model(random_ids()).logits, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_close(ladder):
    half = clone(ladder).to(torch.bfloat16)
    error = (half(random_ids()).logits.float() - ladder(random_ids()).logits).norm() / ladder(random_ids()).logits.norm()
    assert half(random_ids()).logits.dtype == torch.bfloat16
    assert error < 0.05


def test_gradient_checkpointing_changes_no_gradient():
    plain = rewire(tiny_model("llama"), "ladder").train()
    checkpointed = clone(plain)
    checkpointed.gradient_checkpointing_enable()
    for model in (plain, checkpointed):
        model(random_ids(), labels=random_ids(), use_cache=False).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    with pytest.raises(ValueError, match="reentrant"):
        plain.gradient_checkpointing_enable({"use_reentrant": True})


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe", "gpt_neox", "gemma3_text"])
def test_save_and_load_round_trip(family, tmp_path):
    model = rewire(tiny_model(family), SPEC)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["wiring"] == "ladder:2-3"
    assert config["model_type"] == f"ladder_{family}"
    assert config["architectures"] == [type(model).__name__]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    assert loaded.wiring == model.wiring
    with torch.no_grad():
        assert torch.equal(loaded(random_ids()).logits, model(random_ids()).logits)


def test_every_all_reduce_of_a_real_model_is_waited_for_once_and_hidden():
    model, recorder = rewire(tiny_model("llama"), "ladder"), Recorder()
    for index, layer in enumerate(model.base_model.layers):
        recorder.watch(layer.self_attn, f"attention {index}")
        recorder.watch(layer.mlp, f"mlp {index}")
    set_reducer(model, recorder)
    model(random_ids())
    recorder.check_each_waited_once()
    assert recorder.hidden() == [True] * 7 + [False]


def test_the_authors_config_field_is_read():
    fields = {key: value for key, value in tiny_config("llama").to_dict().items() if key != "model_type"}
    assert ladder_config_class("llama")(**fields, ladder_layers=1).wiring == "ladder:3"
    with pytest.raises(ValueError, match="layer 9"):
        ladder_config_class("llama")(**fields, wiring="ladder:9")


def test_config_classes_can_be_pickled_and_copied(ladder):
    again = pickle.loads(pickle.dumps(ladder.config))
    assert again.wiring == ladder.config.wiring
    assert type(again) is type(ladder.config)
    assert type(again).__module__ == "ladder_residual.models.hf"


def test_tokenizer_of_a_rewired_checkpoint(demo_dir, tmp_path):
    from ladder_residual.models.convert import convert

    convert(demo_dir, tmp_path / "ladder", "ladder")
    assert AutoConfig.from_pretrained(tmp_path / "ladder").wiring == "ladder"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ladder")
    assert tokenizer.decode(tokenizer("Once upon a time").input_ids, skip_special_tokens=True) == "Once upon a time"
