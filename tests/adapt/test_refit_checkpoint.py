"""``--refit`` with ``--quantize``: projections are rounded on the way, and what is written is what was measured."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from ladder_residual.adapt.refit import Refit
from ladder_residual.adapt.refit_checkpoint import mean_loss, refit
from ladder_residual.cli.main import app
from ladder_residual.core.config import Wiring
from ladder_residual.models.convert import convert
from ladder_residual.models.hf import rewire
from ladder_residual.models.loading import load_model
from ladder_residual.models.quantization.checkpoint import open_checkpoint
from ladder_residual.models.quantization.rounding import Fp8, Int4
from ladder_residual.models.quantization.write import is_quantized
from tests.tiny_models import random_ids, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:weights in")
TOKENS = 2048


def rows_of(count, length=48, vocabulary=96):
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(1))


def hidden(model, rows):
    with torch.no_grad():
        return model.base_model(input_ids=rows, use_cache=False).last_hidden_state


@pytest.mark.parametrize("format", [Fp8(), Int4(32)], ids=lambda format: format.name)
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "granite"])  # biases, fused, post-norms, a multiplier
def test_less_is_lost_than_by_rounding_to_the_nearest(family, format):
    model, rows = tiny_model(family), rows_of(64)
    original, nearest = hidden(model, rows), copy.deepcopy(model)
    projections = {name for name, _ in model.named_parameters() if is_quantized(name)}
    for name in projections:
        weight = nearest.get_parameter(name)
        weight.data.copy_(format.round(name, weight.data, weight.dtype).weight())
    found = {}
    fitted = Refit(model, Wiring.parse("standard", 4), rows, format=format)
    assert fitted.run(found).keys() == projections  # from the first layer on, whatever the wiring
    assert (hidden(model, rows) - original).norm() < 0.8 * (hidden(nearest, rows) - original).norm()
    for name, rounded in fitted.whole(found, None).items():
        assert torch.equal(rounded.weight(), model.get_parameter(name)), name


def test_a_rewired_model_is_fitted_and_rounded_in_one_walk(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "plain")
    rows, wiring = rows_of(64), Wiring.parse("ladder:2-3", 4)
    model, found = load_model(tmp_path / "plain", dtype="fp32"), {}
    original = hidden(model, rows)
    fitted = Refit(model, wiring, rows, format=Int4(32))
    fitted.run(found)
    done = convert(tmp_path / "plain", tmp_path / "out", wiring, quantize="int4", refitted=fitted.whole(found, None))
    assert (done.placed, done.format, done.after.spec) == ("quantised", "int4 in groups of 32", "ladder:2-3")
    written = load_model(tmp_path / "out", dtype="fp32")
    assert torch.equal(hidden(written, rows), hidden(rewire(model, wiring), rows))
    convert(tmp_path / "plain", tmp_path / "nearest", wiring, quantize="int4")
    nearest = hidden(load_model(tmp_path / "nearest", dtype="fp32"), rows)
    assert (hidden(written, rows) - original).norm() < 0.9 * (nearest - original).norm()
    with pytest.raises(ValueError, match=r"were refitted for wiring ladder:2-3"):
        convert(tmp_path / "out", tmp_path / "back", "standard")


def test_the_file_is_what_was_measured_and_an_interrupted_one_goes_on(ground, tmp_path, monkeypatch):
    once = refit(
        ground / "original", tmp_path / "once", None, ground / "train.txt", quantize="fp8", tokens=TOKENS, device="cpu"
    )
    assert once.converted == once.original
    assert once.conversion.after.spec == "standard"
    assert once.projections == len(open_checkpoint(tmp_path / "once").weights) == 35
    layer, calls = Refit._layer, []

    def stop(self, index, kept):
        if index == 3:
            raise KeyboardInterrupt
        layer(self, index, kept)

    asked = dict(quantize="fp8", tokens=TOKENS, device="cpu", log=calls.append)
    monkeypatch.setattr(Refit, "_layer", stop)
    with pytest.raises(KeyboardInterrupt):
        refit(ground / "original", tmp_path / "again", None, ground / "train.txt", **asked)
    monkeypatch.undo()
    again = refit(ground / "original", tmp_path / "again", None, ground / "train.txt", **asked)
    assert calls == [f"resume   3 layers are in {tmp_path / 'again.refit'}"]
    first, second = (load_file(tmp_path / which / "model.safetensors") for which in ("once", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name].float(), second[name].float()) for name in first)
    assert (once.refitted, once.projections) == (again.refitted, again.projections)
    rows = torch.randint(3, 512, (4, 64))
    assert mean_loss(load_model(tmp_path / "once"), "standard", rows) == mean_loss(
        load_model(tmp_path / "again"), "standard", rows
    )
    assert open_checkpoint(tmp_path / "once").spec.describe() == "fp8 (compressed-tensors, a scale per channel)"


def test_the_command_and_what_it_refuses(ground, tmp_path):
    def run(*words):
        return CliRunner().invoke(app, ["convert", str(ground / "original"), str(tmp_path / "out"), *map(str, words)])

    text = ("--refit", ground / "train.txt", "--refit-tokens", TOKENS, "--device", "cpu")
    for words, message in (
        (text, "nothing to convert"),
        ((*text, "--wiring", "standard"), "--refit changes nothing in a standard model"),
        ((*text, "--quantize", "fp8", "--tp", 2), "--quantize with --refit takes one process: leave out --tp 2"),
        ((*text, "--quantize", "int4"), "down_proj.weight has 172 columns, and int4 needs groups of 32, 64, 128"),
        ((*text, "--quantize", "fp8", "--wiring", "desync-2x"), "--refit is for ladder"),
    ):
        ran = run(*words)
        assert message in str(ran.exception or ran.output), (words, ran.output)
        assert not (tmp_path / "out").exists()
    ran = run(*text, "--quantize", "fp8")
    assert ran.exit_code == 0, ran.output
    for said in ("refitted 35 projections on 2,048 tokens and rounded them to fp8 per channel", " quantised (held-out rows"):
        assert said in ran.output
    assert load_model(tmp_path / "out")(random_ids()).logits.isfinite().all()
