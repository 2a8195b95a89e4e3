"""Choosing layers: cached prefixes against whole forward passes, the search against its promises, the command."""

import itertools
import json
import math

import pytest
import torch
from typer.testing import CliRunner

from ladder_residual.adapt.auto import Phases, Request, some_sizes, texts
from ladder_residual.adapt.probe import Probe
from ladder_residual.adapt.select import curves, mean_and_error, ordered, select
from ladder_residual.cli.main import app
from ladder_residual.data.encoder import Encoder
from ladder_residual.data.tokenizer import read_tokenizer
from ladder_residual.models.hf import rewire
from tests.tiny_models import VOCAB, clone, oracle_logits, tiny_model


def rows(count=5, length=12):
    return torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(5))


def by_hand(model, ids, layers):
    """Loss and KL of each row from whole logits of the recurrence written out."""
    logits, original = (oracle_logits(model, chosen, input_ids=ids).float().log_softmax(-1) for chosen in (layers, ()))
    losses = -logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].mean(1)
    divergences = (original.exp() * (original - logits)).sum(-1)[:, :-1].mean(1)
    return losses.tolist(), divergences.tolist()


@pytest.mark.parametrize("family", ["llama", "olmo2", "granite", "gemma2"])
def test_costs_equal_whole_forward_passes(family):
    model = tiny_model(family)
    ids = rows()
    probe = Probe(clone(model), ids, batch=2)
    assert probe.original.kl == pytest.approx(0, abs=1e-6)
    other = Probe(clone(model), ids, batch=2)
    near = other.cache_states([1, 3])
    for layers in [(), (0,), (3,), (1, 2), (0, 2, 3), (0, 1, 2, 3)]:
        losses, divergences = by_hand(model, ids, layers)
        for cost in (probe.cost(layers), other.cost(layers, near)):  # from the original's states, and from those of another set
            assert cost.losses == pytest.approx(losses, rel=1e-4, abs=1e-5)
            assert cost.divergences == pytest.approx(divergences, rel=1e-3, abs=1e-5)


def test_a_kept_state_saves_the_layers_below():
    probe = Probe(tiny_model(), rows())
    before = probe.passes
    probe.cost([3])
    assert probe.passes - before == pytest.approx(1 / 4)
    before = probe.passes
    probe.cost([0])
    assert probe.passes - before == pytest.approx(1)


def test_rewired_models_are_refused():
    with pytest.raises(ValueError, match="rewired already"):
        Probe(rewire(tiny_model(), "ladder:last-half"), rows())


def test_our_choice_is_never_worse_than_the_last_layers_on_the_calibration_text():
    for seed in range(3):
        selection = select(Probe(tiny_model(seed=seed), rows(8)), width=2)
        assert sorted(selection.chosen) == [1, 2, 3, 4]
        for k, cost in selection.chosen.items():
            assert len(cost.layers) == k
            assert cost.kl <= selection.last[k].kl
            assert cost.loss <= selection.last[k].loss
            assert selection.reasons[k]


def test_with_all_additions_tried_pairs_grow_from_the_best_layer_or_the_last():
    probe = Probe(tiny_model(seed=1), rows(8))
    selection = select(probe, 2, width=4)
    single = min(selection.single, key=lambda cost: cost.kl)
    reachable = [pair for pair in itertools.combinations(range(4), 2) if single.layers[0] in pair or 3 in pair]
    best = min((probe.cost(pair) for pair in reachable), key=lambda cost: cost.kl)
    gains = [b - a for a, b in zip(best.divergences, selection.last[2].divergences, strict=True)]
    mean, error = mean_and_error(gains)
    losses = [b - a for a, b in zip(best.losses, selection.last[2].losses, strict=True)]
    sure = mean > error and mean_and_error(losses)[0] > mean_and_error(losses)[1]
    assert selection.chosen[2].layers == (best.layers if sure else (2, 3))


def test_a_budget_ends_the_search_and_is_kept():
    probe = Probe(tiny_model(), rows())
    whole = select(probe, width=2)
    rises = {k: cost.loss - whole.original_loss for k, cost in whole.chosen.items()}
    budget = max(rises[2], 1e-3)
    selection = select(probe, budget=budget, width=2)
    k = selection.within(budget)
    assert rises[k] <= budget
    assert all(rises[other] > budget for other in range(k + 1, 5) if other in selection.chosen)


@pytest.mark.parametrize(("arguments", "message"), [({"most": 0}, "choose 1 to 4"), ({"most": 5}, "choose 1 to 4")])
def test_impossible_numbers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        select(Probe(tiny_model(), rows()), **arguments)


def test_orders():
    assert ordered("last-k", 6, 2) == (4, 5)
    assert ordered("first-k", 6, 2) == (0, 1)
    assert ordered("every-other", 6, 2) == (3, 5)
    assert ordered("every-other", 6, 4) == (1, 3, 4, 5)
    with pytest.raises(ValueError, match="last-k"):
        ordered("upside-down", 6, 1)


def test_curves_meet_where_all_layers_are_converted():
    probe = Probe(tiny_model(), rows())
    found = curves(probe, select(probe, width=1))
    assert set(found) == {"ours", "last-k", "first-k", "every-other"}
    ends = [points[-1]["loss"] for points in found.values()]
    assert ends == pytest.approx([ends[0]] * 4, rel=1e-5)
    assert [point["k"] for point in found["ours"]] == [1, 2, 3, 4]


def calibration_text(demo_dir, folder):
    path = folder / "stories.txt"
    path.write_text(
        (demo_dir / "stories.txt").read_text(encoding="utf-8").replace("\n\n", "\n<|endoftext|>\n"), encoding="utf-8"
    )
    return path


def test_convert_auto_chooses_explains_and_keeps_the_curves(demo_dir, tmp_path):
    text = calibration_text(demo_dir, tmp_path)
    target = tmp_path / "auto"
    command = ["convert", str(demo_dir), str(target), "--wiring", "auto", "--layers", "2", "--calibration", str(text)]
    result = CliRunner().invoke(app, [*command, "--calibration-tokens", "2048", "--device", "cpu"], catch_exceptions=False)
    assert "chosen   ladder:" in result.output
    assert "held-out     loss" in result.output
    document = json.loads((target / "selection.json").read_text(encoding="utf-8"))
    assert json.loads((target / "config.json").read_text(encoding="utf-8"))["wiring"] == document["wiring"]
    assert len(document["layers"]) == 2
    assert len(document["single"]) == 5
    for curve in document["curves"].values():
        assert {order: len(points) for order, points in curve.items()} == dict.fromkeys(curve, 2)
        assert all(math.isfinite(point["loss"]) for points in curve.values() for point in points)
    assert (target / "selection.svg").read_text(encoding="utf-8").startswith("<svg")
    assert (target / "model.safetensors").samefile(demo_dir / "model.safetensors")  # weights are untouched


def test_the_text_that_checks_is_not_the_text_that_chose(demo_dir, tmp_path):
    text = calibration_text(demo_dir, tmp_path)
    encoder = Encoder(read_tokenizer(demo_dir), 512)
    calibration, check = texts(Request(str(text), layers=1), encoder, 128, 8)
    assert len(calibration) == len(check) == 8
    assert not any((row == other).all() for row in calibration for other in check)


def test_a_calibration_text_is_read_only_as_far_as_it_is_needed(demo_dir, hub):
    (hub / "stories").mkdir()
    rows = [json.dumps({"text": "Once upon a time there was a cat. " * 40}) + "\n"] * 200
    (hub / "stories" / "train.jsonl").write_text("".join(rows) + json.dumps({"text": 7}) + "\n", encoding="utf-8")
    encoder = Encoder(read_tokenizer(demo_dir), 512)
    for source in ("owner/stories", str(hub / "stories" / "train.jsonl")):
        calibration, check = texts(Request(source, layers=1), encoder, 128, 8)  # the last line, which is broken, is not reached
        assert calibration.shape == check.shape == (8, 128)


def test_too_little_text_is_refused(demo_dir, tmp_path):
    (tmp_path / "short.txt").write_text("Once upon a time", encoding="utf-8")
    encoder = Encoder(read_tokenizer(demo_dir), 512)
    with pytest.raises(
        ValueError, match=r"short.txt gives 0 full rows of 128 tokens, and at least 4 are needed: give more text"
    ):
        texts(Request(str(tmp_path / "short.txt"), layers=1), encoder, 128, 8)
    text = str(calibration_text(demo_dir, tmp_path))
    with pytest.raises(ValueError, match=r"short.txt gives 0 full rows of 128 tokens, and at least 1 are needed"):
        texts(Request(text, layers=1, check=str(tmp_path / "short.txt")), encoder, 128, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wiring", "auto", "--layers", "2"], "--calibration FILE"),
        (["--wiring", "auto", "--calibration", "x.txt"], "--layers K"),
        (["--wiring", "auto", "--calibration", "x.txt", "--layers", "2", "--budget", "0.1"], "--layers K"),
        (["--wiring", "auto", "--calibration", "missing.txt", "--layers", "2"], "missing.txt"),
        (["--wiring", "ladder", "--layers", "2"], "belong to --wiring auto"),
    ],
)
def test_what_is_missing_or_too_much_is_named(demo_dir, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, ["convert", str(demo_dir), str(tmp_path / "x"), *options], catch_exceptions=False)


def test_a_budget_that_no_layer_meets_is_refused_with_the_cheapest(demo_dir, tmp_path):
    text = calibration_text(demo_dir, tmp_path)
    command = [
        "convert",
        str(demo_dir),
        str(tmp_path / "x"),
        "--wiring",
        "auto",
        "--budget",
        "1e-6",
        "--calibration",
        str(text),
    ]
    with pytest.raises(ValueError, match=r"the cheapest, layer \d, costs 0\."):
        CliRunner().invoke(app, [*command, "--calibration-tokens", "1024", "--device", "cpu"], catch_exceptions=False)
    assert not (tmp_path / "x").exists()


def test_a_set_is_measured_once():
    probe = Probe(tiny_model(), rows())
    selection = select(probe, width=1)
    before = probe.passes
    curves(probe, selection, [2, 4])
    fixed = {ordered(order, 4, k) for order in ("first-k", "every-other") for k in (2, 4)}
    assert probe.passes - before <= len(fixed)  # our sets and the last k were measured by the search
    before = probe.passes
    curves(probe, selection, [2, 4])
    assert probe.passes == before


def test_a_cpu_draws_few_sizes_and_the_chosen_one_is_among_them():
    assert some_sizes(range(1, 31), 13, 4) == [11, 13, 20, 30]
    assert some_sizes(range(1, 31), 0, 4) == [11, 20, 30]
    assert some_sizes([3, 1, 2], 2, 4) == [1, 2, 3]
    assert some_sizes(range(1, 31), 13, None) == list(range(1, 31))


def test_every_phase_shows_the_time_left(capsys):
    phases = Phases(4)
    probe = Probe(tiny_model(), rows())
    selection = select(probe, 2, phase=phases)
    curves(probe, selection, phase=phases)
    shown = capsys.readouterr().err
    for name in ("1/4 each layer alone", "2/4 sets of layers", "3/4 curves"):
        line = next(line for line in reversed(shown.replace("\r", "\n").splitlines()) if line.startswith(name))
        assert "100 %" in line
        assert "left" in line
