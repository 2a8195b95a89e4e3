"""Refit in closed form: the sums against a plain least-squares solver, a walk in batches against one in a single batch, the files."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ladder_residual.adapt import least_squares
from ladder_residual.adapt import refit as refit_module
from ladder_residual.adapt.auto import full_rows
from ladder_residual.adapt.least_squares import Regression, ridge_regression
from ladder_residual.adapt.probe import Probe
from ladder_residual.adapt.refit import Refit
from ladder_residual.adapt.refit_checkpoint import CHECK_ROWS, RefitResult, mean_loss, refit
from ladder_residual.cli.main import app
from ladder_residual.core.config import Wiring
from ladder_residual.data.encoder import Encoder
from ladder_residual.data.tokenizer import read_tokenizer
from ladder_residual.models.convert import convert
from ladder_residual.models.finite import NonFiniteError
from ladder_residual.models.loading import load_model
from tests.tiny_models import tiny_model


def by_qr(x, y, prior, ridge):
    """W for |W x - y|^2 + r |W - prior|^2 by QR on the stacked system."""
    root = (ridge * float((x.T @ x).diagonal().mean())) ** 0.5
    left = torch.cat([x, root * torch.eye(x.shape[1], dtype=x.dtype)])
    return torch.linalg.lstsq(left, torch.cat([y, root * prior.T])).solution.T


def test_sums_over_batches_solve_the_least_squares_problem(monkeypatch):
    torch.manual_seed(0)
    x, prior = torch.randn(48, 7).double(), torch.randn(3, 7).double()
    y = x @ torch.randn(7, 3).double()
    monkeypatch.setattr(least_squares, "RIDGES", (0.05,))
    sums = Regression()
    for part in range(0, 48, 20):  # batches of unequal length
        sums.add(x[part : part + 20], y[part : part + 20])
    assert torch.allclose(sums.solve(prior, "here"), by_qr(x, y, prior, 0.05), atol=1e-5)


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 0.0, 0.003), (3.0, 0.03, 1.0)])
def test_the_ridge_is_chosen_on_rows_held_out(noise, least, most, monkeypatch):
    """Little for a rule that holds, much for noise."""
    torch.manual_seed(0)
    rule, prior = torch.randn(4, 20).double(), torch.zeros(4, 20)
    sums, chosen = Regression(), []
    monkeypatch.setattr(least_squares, "ridge_regression", lambda *sums: chosen.append(sums[-1]) or ridge_regression(*sums))
    for _ in range(5):
        x = torch.randn(8, 20).double()
        sums.add(x, x @ rule.T + noise * torch.randn(8, 4).double())
    sums.solve(prior, "here")
    assert least <= chosen[-1] <= most


def test_weights_that_cannot_be_improved_stay():
    torch.manual_seed(0)
    x, prior = torch.randn(16, 30).double(), torch.randn(3, 30).double()
    sums = Regression()
    for part in (0, 8):
        sums.add(x[part : part + 8], x[part : part + 8] @ prior.T)
    assert sums.solve(prior, "here") is None


def test_a_ridge_that_leaves_singular_sums_is_raised(monkeypatch):
    """Two inputs that are always alike, with a ridge too small for the precision of the sums."""
    torch.manual_seed(0)
    monkeypatch.setattr(least_squares, "RIDGES", (1e-30,))
    x, prior = torch.randn(16, 30).double(), torch.zeros(3, 12)
    x = torch.cat([x[:, :6], x[:, :6]], 1)
    sums = Regression()
    for part in (0, 8):
        sums.add(x[part : part + 8], x[part : part + 8, :3])
    found = sums.solve(prior, "here")
    assert sums.singular
    assert torch.allclose(x @ found.T, x[:, :3], atol=1e-3)
    regular = Regression()
    regular.add(torch.randn(8, 5), torch.randn(8, 3))
    regular.solve(torch.zeros(3, 5), "here")
    assert not regular.singular


def test_weights_that_two_layers_share_are_refused():
    model = tiny_model("llama")
    model.base_model.layers[1].mlp.up_proj.weight = model.base_model.layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match="but layers.0.mlp.up_proj.weight and layers.1.mlp.up_proj.weight share theirs"):
        Refit(model, Wiring.parse("ladder", 4), rows_of(8, vocabulary=96))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_layer_alone_is_refitted_as_with_a_wiring_of_that_layer(family):
    rows, model = rows_of(16, vocabulary=96), tiny_model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    alone = Refit(model, Wiring.parse("ladder", 4), rows).alone()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    for index in (0, 2):
        changed = Refit(copy.deepcopy(model), Wiring.parse(f"ladder:{index}", 4), rows).run()
        own = {name.split(f"layers.{index}.")[1]: tensor for name, tensor in changed.items() if f"layers.{index}." in name}
        assert len(own) >= 2  # the attention of layer 0 reads what it always read
        for name, tensor in own.items():
            assert torch.equal(alone[index].get_parameter(name), tensor), name


def test_the_cost_of_refitted_layers_is_that_of_a_model_which_has_them():
    rows, check, model = rows_of(16, vocabulary=96), rows_of(6, 12, 96), tiny_model("llama")
    alone = Refit(model, Wiring.parse("ladder", 4), rows).alone()
    probe = Probe(model, check, batch=4, converted=alone)
    plain = Probe(model, check, batch=4)
    swapped = copy.deepcopy(model)
    for index in (1, 2):
        swapped.base_model.layers[index].load_state_dict(alone[index].state_dict())
    expected = mean_loss(swapped, "ladder:1-2", check)
    assert probe.cost([1, 2]).loss == pytest.approx(expected, rel=1e-4)
    assert probe.cost([1, 2]).kl != pytest.approx(plain.cost([1, 2]).kl, rel=1e-3)
    assert probe.original.loss == plain.original.loss


def rows_of(count, length=48, vocabulary=512):
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(1))


def seen_by(model, part, rows):
    """What a part of every layer reads and gives, rows of all tokens."""
    calls = []

    def note(module, inputs, output):
        calls.append(tuple(x.detach().reshape(-1, x.shape[-1]).double() for x in (inputs[0], output)))

    hooks = [layer.get_submodule(part).register_forward_hook(note) for layer in model.base_model.layers]
    with torch.no_grad():
        model(input_ids=rows, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize("family", ["qwen3", "llama", "granite"])  # without biases, with biases, with a multiplier
def test_the_first_converted_module_is_fitted_by_least_squares(family, monkeypatch):
    """Below nothing has changed, so what both models read there is known without the walk. The rows that are held out are among the
    others, or nothing would be gained: o_proj suits what the fitted q, k and v give it as well as the tokens tell."""
    monkeypatch.setattr(least_squares, "RIDGES", (0.01,))
    rows, wiring, first = rows_of(16, vocabulary=96).repeat_interleave(4, 0), "ladder:2-3", 2
    model = tiny_model(family)
    converted = refit_module.rewire(copy.deepcopy(model), wiring)
    changed = Refit(copy.deepcopy(model), Wiring.parse(wiring, 4), rows).run()
    norms = [seen_by(each, "input_layernorm", rows)[first][1] for each in (model, converted)]
    assert not torch.allclose(*norms)
    original, attention = (each.base_model.layers[first].self_attn for each in (model, converted))
    for part in ("q_proj", "k_proj", "v_proj"):
        plain = getattr(original, part).weight.detach().double()
        expected = by_qr(norms[1], norms[0] @ plain.T, plain, 0.01)
        found = changed[f"model.layers.{first}.self_attn.{part}.weight"]
        assert torch.allclose(found.double(), expected, atol=1e-4)
        getattr(attention, part).weight.data.copy_(found)
    plain = original.o_proj.weight.detach().double()
    wanted = seen_by(model, "self_attn.o_proj", rows)[first][0] @ plain.T
    stream = seen_by(model, "post_attention_layernorm", rows)[first][0]
    relative = stream.square().mean(-1, keepdim=True).rsqrt()  # errors count relative to the stream they end up in
    expected = by_qr(seen_by(converted, "self_attn.o_proj", rows)[first][0] * relative, wanted * relative, plain, 0.01)
    found = changed[f"model.layers.{first}.self_attn.o_proj.weight"]
    assert torch.allclose(found.double(), expected, atol=1e-4)
    assert not torch.allclose(expected, plain, atol=5e-3)
    assert all(int(name.split(".")[2]) >= first for name in changed)


def test_inputs_alone_leave_the_outputs(ground):
    changed = Refit(load_model(ground / "original"), Wiring.parse("ladder", 5), rows_of(16), outputs=False).run()
    assert changed
    assert not any("o_proj" in name or "down_proj" in name for name in changed)


def test_a_projection_that_reads_zeros_stays_and_one_that_reads_nan_is_named(ground):
    model = load_model(ground / "original")
    model.base_model.layers[3].self_attn.v_proj.weight.data.zero_()
    changed = Refit(model, Wiring.parse("ladder", 5), rows_of(16)).run()
    assert "model.layers.3.self_attn.o_proj.weight" not in changed
    assert "model.layers.3.self_attn.q_proj.weight" in changed
    broken = load_model(ground / "original")
    broken.base_model.layers[2].input_layernorm.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="model.layers.2.self_attn: what it reads"):
        Refit(broken, Wiring.parse("ladder", 5), rows_of(16)).run()


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
    assert 0 < result.gap_closed < 100
    assert json.loads((target / "config.json").read_text())["wiring"] == "ladder:3-4"
    before, after = (load_file(folder / "model.safetensors") for folder in (ground / "original", target))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed <= {name for name in before if "_proj" in name and (".3." in name or ".4." in name)}
    assert 0 < len(changed) == result.projections
    assert {name: tensor.dtype for name, tensor in before.items()} == {name: tensor.dtype for name, tensor in after.items()}
    assert load_model(target).wiring.spec == "ladder:3-4"
    with pytest.raises(ValueError, match="were refitted for wiring ladder:3-4: convert the original to standard"):
        convert(target, target.parent / "back", "standard")


def test_the_loss_that_is_printed_is_that_of_the_file(done, ground):
    result, target = done
    encoder = Encoder(read_tokenizer(target), 512)
    rows = torch.from_numpy(full_rows(str(ground / "train.txt"), encoder, 512, 2048 // 512 + CHECK_ROWS, 1))[-CHECK_ROWS:]
    with torch.no_grad():
        logits = load_model(target)(rows).logits[:, :-1].flatten(0, 1)
    assert float(torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten())) == pytest.approx(result.refitted, abs=2e-3)


def test_weights_are_found_under_the_names_they_are_stored_by(ground, tmp_path):
    """Some checkpoints store layers without `model.` before them; a weight that has no place is refused."""
    shutil.copytree(ground / "original", tmp_path / "bare")
    stored = load_file(tmp_path / "bare" / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in stored.items()}, tmp_path / "bare" / "model.safetensors")
    name = "model.layers.4.mlp.up_proj.weight"
    ones = torch.ones(stored[name].shape)
    convert(tmp_path / "bare", tmp_path / "out", "ladder", refitted={name: ones})
    assert bool((load_file(tmp_path / "out" / "model.safetensors")[name.removeprefix("model.")] == 1).all())
    for refused, message in (({"no.such.name": ones}, "no tensor no.such.name"), ({name: ones.double() * 1e39}, "overflows")):
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "bare", tmp_path / "more", "ladder", refitted=refused)
    assert not (tmp_path / "more").exists()


def test_a_refit_that_does_not_help_says_so(done):
    said = []
    RefitResult(done[0].conversion, 2048, original=2.0, converted=1.9, refitted=2.1, projections=3, singular=2).describe(
        said.append
    )
    assert "does not help here" in said[-1]
    assert "what 2 modules read on this text is singular" in said[-2]
    assert "gap" not in "".join(said)


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
        (
            "ladder",
            {"text": "short.txt"},
            r"short.txt gives 0 tokens in full rows of 512: a projection reads 172 numbers, so at least 2048 are",
        ),
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


def test_quantised_weights_and_options_without_a_text_are_refused(ground, tmp_path):
    convert(ground / "original", tmp_path / "fp8", quantize="fp8")
    with pytest.raises(ValueError, match="quantised"):
        refit(tmp_path / "fp8", tmp_path / "out", "ladder", ground / "train.txt", device="cpu")
    for options, message in (
        (["--wiring", "ladder", "--refit-tokens", "9"], "--refit-tokens 9 belongs to --refit"),
        (["--wiring", "ladder", "--refit", "nowhere.txt"], "--refit nowhere.txt: no such file"),
    ):
        ran = CliRunner().invoke(app, ["convert", str(ground / "original"), str(tmp_path / "out"), *options])
        assert message in str(ran.exception or ran.output), ran.output
