"""Refit in closed form: the sums against a plain least-squares solver, a walk in batches against one in a single batch, the files."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from ladder_residual.adapt import refit as refit_module
from ladder_residual.adapt.refit import Refit, Regression, ridge_regression
from ladder_residual.adapt.refit_checkpoint import refit
from ladder_residual.cli.main import app
from ladder_residual.core.config import Wiring
from ladder_residual.models.convert import convert
from ladder_residual.models.loading import load_model
from tests.tiny_models import tiny_model


def least_squares(x, y, prior, ridge):
    """W for |W x - y|^2 + r |W - prior|^2 by QR on the stacked system."""
    root = (ridge * float((x.T @ x).diagonal().mean())) ** 0.5
    left = torch.cat([x, root * torch.eye(x.shape[1], dtype=x.dtype)])
    return torch.linalg.lstsq(left, torch.cat([y, root * prior.T])).solution.T


def test_sums_over_batches_solve_the_least_squares_problem(monkeypatch):
    torch.manual_seed(0)
    x, prior = torch.randn(48, 7).double(), torch.randn(3, 7).double()
    y = x @ torch.randn(7, 3).double()
    monkeypatch.setattr(refit_module, "RIDGES", (0.05,))
    sums = Regression()
    for part in range(0, 48, 20):  # batches of unequal length
        sums.add(x[part : part + 20], y[part : part + 20])
    assert torch.allclose(sums.solve(prior), least_squares(x, y, prior, 0.05), atol=1e-5)


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 0.0, 0.003), (3.0, 0.03, 1.0)])
def test_the_ridge_is_chosen_on_rows_held_out(noise, least, most, monkeypatch):
    """Little for a rule that holds, much for noise."""
    torch.manual_seed(0)
    rule, prior = torch.randn(4, 20).double(), torch.zeros(4, 20)
    sums, chosen = Regression(), []
    monkeypatch.setattr(refit_module, "ridge_regression", lambda *sums: chosen.append(sums[-1]) or ridge_regression(*sums))
    for _ in range(5):
        x = torch.randn(8, 20).double()
        sums.add(x, x @ rule.T + noise * torch.randn(8, 4).double())
    sums.solve(prior)
    assert least <= chosen[-1] <= most


def test_weights_that_cannot_be_improved_stay():
    torch.manual_seed(0)
    x, prior = torch.randn(16, 30).double(), torch.randn(3, 30).double()
    sums = Regression()
    for part in (0, 8):
        sums.add(x[part : part + 8], x[part : part + 8] @ prior.T)
    assert torch.equal(sums.solve(prior), prior)


def rows_of(count, length=48, vocabulary=512):
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(1))


def first_inputs(model, rows):
    """What the attention of every layer reads, after its norm."""
    seen = []
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda norm, inputs, output: seen.append(output))
        for layer in model.base_model.layers
    ]
    with torch.no_grad():
        model(input_ids=rows, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [x.reshape(-1, x.shape[-1]).double() for x in seen]


def test_the_first_converted_projections_are_those_of_least_squares(ground, monkeypatch):
    """Below nothing has changed, so what both models read there is known without the walk."""
    monkeypatch.setattr(refit_module, "RIDGES", (0.05,))
    rows, wiring = rows_of(16), Wiring.parse("ladder:2-4", 5)
    original, converted = load_model(ground / "original"), load_model(ground / "original", wiring=wiring.spec)
    before, after = first_inputs(original, rows)[2], first_inputs(converted, rows)[2]
    assert not torch.allclose(before, after)
    attention = original.base_model.layers[2].self_attn
    names = [f"{part}_proj" for part in "qkv"]
    plain = {name: getattr(attention, name).weight.detach().double() for name in names}
    expected = {name: least_squares(after, before @ weight.T, weight, 0.05) for name, weight in plain.items()}
    changed = Refit(original, wiring, rows, outputs=False).run()
    for name in names:
        assert torch.allclose(changed[f"model.layers.2.self_attn.{name}.weight"].double(), expected[name], atol=2e-4)
    assert all("layers.0." not in name and "layers.1." not in name for name in changed)
    assert not any("o_proj" in name or "down_proj" in name for name in changed)


def test_batches_give_what_one_batch_gives(ground, monkeypatch):
    rows, wiring = rows_of(20), Wiring.parse("ladder:1,3", 5)
    several = Refit(load_model(ground / "original"), wiring, rows).run()
    monkeypatch.setattr(refit_module, "BATCH", 64)
    at_once = Refit(load_model(ground / "original"), wiring, rows).run()
    assert several.keys() == at_once.keys()
    assert {name.split(".")[2] for name in several} == {"1", "2", "3", "4"}  # the layers from the first converted one on
    for name, weight in several.items():
        assert torch.allclose(weight, at_once[name], atol=1e-4), name


@pytest.mark.parametrize("family", ["qwen2", "phi3", "granite", "gemma2", "gpt_neox", "olmo2"])
def test_every_shape_of_layer_comes_nearer_to_the_original(family):
    """Biases, fused projections, a residual multiplier, post-norms, no pre-norm: the hidden states after the last layer."""
    rows, wiring = rows_of(48, vocabulary=96), "ladder"
    model = tiny_model(family)
    original = hidden(model, rows)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Refit(model, Wiring.parse(wiring, model.config.num_hidden_layers), rows).run()
    refitted = distance(hidden(refit_module.rewire(model, wiring), rows), original)
    model.load_state_dict(state)
    assert refitted < 0.9 * distance(hidden(model, rows), original)


def hidden(model, rows):
    with torch.no_grad():
        return model.base_model(input_ids=rows, use_cache=False).last_hidden_state


def distance(one, other):
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def done(ground, tmp_path_factory):
    target = tmp_path_factory.mktemp("refit") / "refitted"
    return refit(ground / "original", target, "ladder:last-half", ground / "train.txt", tokens=2048, device="cpu"), target


def test_a_refitted_checkpoint_is_nearer_and_differs_in_its_projections_alone(done, ground):
    result, target = done
    assert result.original < result.refitted < result.converted
    assert 0 < result.gap_closed < 1
    assert json.loads((target / "config.json").read_text())["wiring"] == "ladder:3-4"
    before, after = (load_file(folder / "model.safetensors") for folder in (ground / "original", target))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed <= {name for name in before if "_proj" in name and (".3." in name or ".4." in name)}
    assert 0 < len(changed) == result.projections
    assert {name: tensor.dtype for name, tensor in before.items()} == {name: tensor.dtype for name, tensor in after.items()}
    assert load_model(target).wiring.spec == "ladder:3-4"


def test_the_command_says_what_was_lost_and_regained(ground, tmp_path):
    arguments = [str(ground / "original"), str(tmp_path / "out"), "--wiring", "ladder:4", "--device", "cpu", "--refit"]
    ran = CliRunner().invoke(app, ["convert", *arguments, str(ground / "train.txt"), "--refit-tokens", "2048"])
    assert ran.exit_code == 0, ran.output
    for said in (" projections on 2,048 tokens", "original", "of the gap closed", "(refitted)"):
        assert said in ran.output


@pytest.mark.parametrize(
    ("wiring", "more", "message"),
    [
        ("desync-2x", {}, "--refit is for ladder"),
        ("ladder", {"tokens": 100}, "--refit-tokens 100 is too few: a projection reads 172 numbers, so give at least 2048"),
        ("ladder", {"text": "short.txt"}, r"short.txt gives \d+ full rows of 512 tokens, and at least 12 are needed"),
        ("ladder", {"source": "ladder"}, "rewired already"),
        ("ladder", {"target": "half"}, "not empty"),
    ],
)
def test_what_cannot_be_refitted_is_refused(wiring, more, message, ground, tmp_path):
    (ground / "short.txt").write_text("Once upon a time.")
    source, text = ground / more.pop("source", "original"), ground / more.pop("text", "train.txt")
    target = ground / more.pop("target") if "target" in more else tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        refit(source, target, wiring, text, device="cpu", **more)
    assert not (tmp_path / "out").exists()


def test_quantised_weights_and_two_changes_at_once_are_refused(ground, tmp_path):
    convert(ground / "original", tmp_path / "fp8", quantize="fp8")
    with pytest.raises(ValueError, match="quantised"):
        refit(tmp_path / "fp8", tmp_path / "out", "ladder", ground / "train.txt", device="cpu")
    text = ["--refit", str(ground / "train.txt")]
    for options, message in (
        ([*text, "--wiring", "ladder", "--quantize", "fp8"], "refit first, then quantise"),
        (["--wiring", "ladder", "--refit-tokens", "9"], "--refit-tokens 9 belongs to --refit"),
        (["--wiring", "ladder", "--refit", "nowhere.txt"], "--refit nowhere.txt: no such file"),
    ):
        ran = CliRunner().invoke(app, ["convert", str(ground / "original"), str(tmp_path / "out"), *options])
        assert message in str(ran.exception or ran.output), ran.output
