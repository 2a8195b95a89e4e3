"""The tables of docs/results/recovery.md, and what docs/lab/recovery.md concludes from them."""

from __future__ import annotations

import pytest

from lab.reports.recovery import against_last, render, selection_table
from lab.reports.recovery_results import Results
from lab.reports.recovery_tasks import TARGET_TASKS, changed_rows, pairs, task_cells
from tests.docs.pages import ROOT, text_of

FOLDER = ROOT / "results" / "adapt"


@pytest.fixture(scope="module")
def results():
    return Results(FOLDER)


def test_the_damage_of_all_orders_is_shown(results):
    shown = selection_table(results.selection)
    assert shown in render(results)
    names = {"ours": "our choice", "last-k": "last k", "first-k": "first k", "every-other": "every other"}
    for order, name in names.items():
        curve = results.selection["curves"]["books_heldout"][order]
        assert f"| {name} | " + " | ".join(f"{point['rise']:.3f}" for point in curve if point["k"] % 5 == 0) + " |\n" in shown


def test_our_choice_is_nowhere_worse(results):
    """stories15M better at 1 and 2 only, SmolLM2 everywhere but at 30; never worse than another order."""
    for found, level in ((results.selection, [30]), (results.second_selection, [3, 4, 5, 6])):
        for curves in found["curves"].values():
            both = list(zip(curves["ours"], curves["last-k"], strict=True))
            assert [ours["k"] for ours, last in both if ours["loss"] >= last["loss"]] == level
            assert [ours["k"] for ours, last in both if ours["layers"] == last["layers"]] == level
            for order in ("last-k", "first-k", "every-other"):
                assert all(ours["loss"] <= other["loss"] for ours, other in zip(curves["ours"], curves[order], strict=True))


def test_a_worse_choice_would_be_shown():
    last = [{"k": k, "layers": [k], "loss": 2.0} for k in (1, 2, 3, 4)]
    ours = [dict(last[0]), *({"k": k, "layers": [0], "loss": loss} for k, loss in ((2, 1.5), (3, 2.25), (4, 2.5)))]
    assert against_last({"ours": ours, "last-k": last}) == (
        "worse than the last k at k = 3, 4, better at 1 of 4 (by 0.500 to 0.500 nats), the same layers at k = 1"
    )
    assert against_last({"ours": last, "last-k": last}) == (
        "at least as good as the last k at every k, the same layers at k = 1, 2, 3, 4"
    )


def test_a_gap_is_measured_on_the_same_rows(results):
    runs = [run for layers in (15, 20, 30) for run in results.target_runs(layers)]
    assert len(runs) == 9
    for run in runs:
        original, before, after = results.losses(run, "wikitext2")
        assert original < after < before
        assert results.closed(run, "wikitext2") == pytest.approx(100 * (before - after) / (before - original))


def test_next_token_runs_are_compared_with_the_control_that_was_trained_alike(results):
    alike = {name: results.control_like(run) for name, run in results.runs.items()}
    found = {name: control["name"] for name, control in alike.items() if control}
    assert found == {"sft 15, 4M": "control sft, 4M", "sft 30, 4M": "control sft 1e-3, 4M"}  # none was trained with Muon


def test_a_task_is_bold_within_one_error_of_the_original(results):
    cells = task_cells(results, "distill 15 chosen, own samples")
    original, scores = (results.tasks["models"][name] for name in ("original", "distill 15 chosen, own samples"))
    for task, cell in zip(TARGET_TASKS, cells, strict=False):
        assert f"{100 * scores[task]['difference']:+.1f}" in cell
        assert cell.startswith("**") == (scores[task]["difference"] >= -original[task]["stderr"])
    assert sum(cell.startswith("**") for cell in cells) == 3


def test_changed_rows_are_weighted_and_split_into_lost_and_won():
    scores = {"large": {"n": 300, "changed": 0.2, "difference": -0.1}, "small": {"n": 100, "changed": 0.4, "difference": 0.2}}
    changed, lost, won, count = changed_rows(scores)
    assert count == 400
    assert (400 * changed, 400 * lost, 400 * won) == pytest.approx((100, 55, 45))  # 45 and 10 lost, 15 and 30 won


def test_distillation_changes_fewer_rows(results):
    """On every task, and loses fewer; accuracy shows it with one optimizer only."""
    models = results.tasks["models"]
    means = {name: sum(models[name][task]["difference"] for task in TARGET_TASKS) / 5 for name in models if name != "original"}
    for ours, theirs, behind in (("distill 15, 4M", "sft 15 muon, 4M", 1.5), ("distill 15 adamw, 4M", "sft 15, 4M", -0.1)):
        assert all(models[ours][task]["changed"] < models[theirs][task]["changed"] for task in models[ours])
        (changed, lost, won, n), (its_changed, its_lost, its_won, _) = (changed_rows(models[name]) for name in (ours, theirs))
        error = sum(share * (1 - share) / n for share in (changed, its_changed)) ** 0.5
        assert its_changed - changed > 6 * error
        assert lost < its_lost
        assert won < its_won
        assert means[ours] - means[theirs] == pytest.approx(behind / 100, abs=0.0005)
    converted = {name: mean for name, mean in means.items() if not name.startswith(("zero-shot", "control"))}
    assert max(converted, key=converted.get) == "distill 15 chosen, own samples"


def test_pairs_that_diverged_or_were_not_scored_are_left_out():
    changed = Results(FOLDER)
    lines = pairs(changed).splitlines()
    changed.pairs["runs"][0]["problem"] = "diverged"
    del changed.pair_tasks["models"][changed.pairs["runs"][1]["name"]]
    assert len(pairs(changed).splitlines()) == len(lines) - 2


def test_distillation_is_nearer_in_every_pair(results):
    """KL on every text, rows on every task. In the loss only with the text's help or all layers."""
    runs = {run["name"]: run for run in results.pairs["runs"]}
    models, original = results.pair_tasks["models"], results.pairs["original"]["wikitext2"]["loss"]
    ours = [name for name in runs if name.startswith(("distill", "recipe"))]
    assert len(ours) == 5
    for name in ours:
        other = "sft " + name.partition(" ")[2]
        for key in ("data", "tokens", "seed", "optimizer", "learning_rate", "other_rate", "batch_tokens", "warmup"):
            assert runs[name]["settings"][key] == runs[other]["settings"][key], (name, key)
        for text, before in runs[name]["before"].items():  # both began as the same model
            assert before["loss"] == pytest.approx(runs[other]["before"][text]["loss"], abs=1e-6)
        assert all(runs[name]["to_original"][text] < runs[other]["to_original"][text] for text in runs[name]["to_original"])
        assert all(models[name][task]["changed"] < models[other][task]["changed"] for task in models[name])
        rise, its = (runs[run]["after"]["wikitext2"]["loss"] - original for run in (name, other))
        assert (rise < its) == (name.startswith("recipe") or " 30 " in name)
    farther = runs["control adamw, seed 0"]["to_original"]["samples_heldout"]
    assert all(farther > runs[name]["to_original"]["samples_heldout"] for name in ours if " 15 " in name)


def test_the_notes_quote_the_pairs_as_they_are(results):
    runs = {run["name"]: run for run in results.pairs["runs"]}
    models = results.pair_tasks["models"]
    page = " ".join(text_of(ROOT / "docs" / "lab" / "recovery.md").split())
    kl = {name: run["to_original"]["wikitext2"] for name, run in runs.items()}
    shares = {name: 100 * changed_rows(models[name])[0] for name in runs}
    means = {name: 20 * sum(models[name][task]["difference"] for task in TARGET_TASKS) for name in runs}
    alone, plain = (
        [f"{method} 15 {how}" for how in ("adamw, seed 0", "muon, seed 0", "muon, seed 1")] for method in ("distill", "sft")
    )
    ahead = [means[a] - means[b] for a, b in zip(alone, plain, strict=True)]
    assert abs(ahead[0]) < 0.1
    control = runs["control adamw, seed 0"]["to_original"]
    assert abs(kl[alone[1]] - kl[alone[2]]) < abs(kl[plain[1]] - kl[plain[2]]) < 0.0055
    for sentence in (
        f"with 15 layers {kl[alone[0]]:.2f} against {kl[plain[0]]:.2f} (AdamW)",
        f"and {kl[plain[2]]:.2f} to {kl[plain[1]]:.2f} (Muon)",
        f"with 30 layers {kl['distill 30 muon, seed 0']:.2f} against {kl['sft 30 muon, seed 0']:.2f}",
        f"{min(shares[name] for name in alone):.1f} to {max(shares[name] for name in alone):.1f} %",
        f"against {min(shares[name] for name in plain):.1f} to {max(shares[name] for name in plain):.1f} %",
        f"({min(ahead[1:3]):.1f} to {means['distill 30 muon, seed 0'] - means['sft 30 muon, seed 0']:.1f} points)",
        f"the control is {control['wikitext2']:.3f} (KL) from the original on WikiText-2 and {control['samples_heldout']:.3f}",
    ):
        assert sentence in page, sentence
