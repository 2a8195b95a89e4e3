"""docs/adaptation.md: its figures are those of the results, its commands run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ladder_residual.adapt.report import FIELDS, against_last, render
from ladder_residual.adapt.report_tasks import TARGET_TASKS, answered_otherwise, changed_rows, pairs, tasks_along_the_tokens
from ladder_residual.adapt.results import Results
from ladder_residual.adapt.rows import Encoder, build_rows
from ladder_residual.corpus.tokens import read_tokenizer

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "adapt"


def test_the_page_and_its_plots_are_what_the_results_say():
    for name, content in render(RESULTS).items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == content, f"run: {COMMAND}"


COMMAND = "python -m ladder_residual.adapt.report results/adapt docs/adaptation.md"


def test_nothing_of_the_page_stayed_empty():
    text = (ROOT / "docs" / "adaptation.md").read_text(encoding="utf-8")
    assert not re.findall(r"<!-- .* -->", text)
    assert COMMAND in text
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link
    assert not re.findall(r"Not (run|measured yet)\.", text)
    assert set(FIELDS) == set(re.findall(r"<!-- (.+?) -->", (RESULTS / "page.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize(("subject", "layers", "texts"), [("SmolLM2", 30, 4), ("stories15M", 6, 2)])
def test_the_page_shows_the_damage_of_all_orders_on_both_models(subject, layers, texts):
    page = (ROOT / "docs" / "adaptation.md").read_text(encoding="utf-8")
    section = page.split("## Which layers\n")[1].split("\n## ")[0]
    first, second = section.split("The same on stories15M")
    shown = first if subject == "SmolLM2" else second
    results = Results(RESULTS)
    found = results.selection if subject == "SmolLM2" else results.second_selection
    assert found.get("model", "SmolLM2") == subject
    assert len(found["curves"]) == texts
    for curves in found["curves"].values():
        for order, name in {
            "ours": "our choice",
            "last-k": "last k",
            "first-k": "first k",
            "every-other": "every other",
        }.items():
            assert [point["k"] for point in curves[order]] == list(range(1, layers + 1))
            kept = [point for point in curves[order] if layers <= 8 or point["k"] % 5 == 0]
            assert f"| {name} | " + " | ".join(f"{point['rise']:.3f}" for point in kept) + " |\n" in shown
    assert shown.count("| our choice |") == texts
    assert shown.count("better at 29 of 30" if subject == "SmolLM2" else "better at 2 of 6") == texts


def test_what_the_page_says_of_our_choice_is_so():
    """In words: nowhere worse than the last k or another order; stories15M better at 1 and 2 only, SmolLM2 everywhere but at 30."""
    results = Results(RESULTS)
    for found, level in ((results.selection, [30]), (results.second_selection, [3, 4, 5, 6])):
        for curves in found["curves"].values():
            pairs = list(zip(curves["ours"], curves["last-k"], strict=True))
            assert [ours["k"] for ours, last in pairs if ours["loss"] >= last["loss"]] == level
            assert [ours["k"] for ours, last in pairs if ours["layers"] == last["layers"]] == level
            for order in ("last-k", "first-k", "every-other"):
                assert all(ours["loss"] <= other["loss"] for ours, other in zip(curves["ours"], curves[order], strict=True))


def test_the_page_would_say_where_our_choice_is_worse():
    last = [{"k": k, "layers": [k], "loss": 2.0} for k in (1, 2, 3, 4)]
    ours = [dict(last[0]), *({"k": k, "layers": [0], "loss": loss} for k, loss in ((2, 1.5), (3, 2.25), (4, 2.5)))]
    assert against_last({"ours": ours, "last-k": last}) == (
        "worse than the last k at k = 3, 4, better at 1 of 4 (by 0.500 to 0.500 nats), the same layers at k = 1"
    )
    assert against_last({"ours": last, "last-k": last}) == (
        "at least as good as the last k at every k, the same layers at k = 1, 2, 3, 4"
    )


def test_a_gap_is_measured_on_the_same_rows():
    results = Results(RESULTS)
    runs = [run for layers in (15, 20, 30) for run in results.target_runs(layers)]
    assert len(runs) == 9
    for run in runs:
        original, before, after = results.losses(run, "wikitext2")
        assert original < after < before
        assert results.closed(run, "wikitext2") == pytest.approx(100 * (before - after) / (before - original))


def test_next_token_runs_are_compared_with_the_control_that_was_trained_alike():
    results = Results(RESULTS)
    alike = {name: results.control_like(run) for name, run in results.runs.items()}
    found = {name: control["name"] for name, control in alike.items() if control}
    assert found == {"sft 15, 4M": "control sft, 4M", "sft 30, 4M": "control sft 1e-3, 4M"}  # none was trained with Muon
    page = (ROOT / "docs" / "adaptation.md").read_text(encoding="utf-8")
    losses = {name: results.runs[name]["after"] for name in ("sft 30, 4M", "control sft 1e-3, 4M")}
    gaps = [
        losses["sft 30, 4M"][text]["loss"] - losses["control sft 1e-3, 4M"][text]["loss"]
        for text in ("books_heldout", "wikitext2")
    ]
    assert re.search(rf"\| sft 30, 4M \|.*\| \+{gaps[0]:.3f} / \+{gaps[1]:.3f} \|\n", page)


def test_accuracy_along_the_tokens_is_that_of_the_tasks():
    lines = [line.split(" | ") for line in tasks_along_the_tokens(Results(RESULTS)).splitlines()[2:]]
    assert [line[1] for line in lines if line[0] == "| last 15"] == ["0M", "4M", "14M", "44M", "48M"]
    scores = Results(RESULTS).tasks["models"]["distill 15 chosen, own samples"]
    (ours,) = (line for line in lines if line[:3] == ["| our 15", "24M", "original, own samples"])
    assert ours[5] == f"{100 * scores['hellaswag']['difference']:+.1f}"


def test_changed_rows_are_weighted_and_split_into_lost_and_won():
    scores = {"large": {"n": 300, "changed": 0.2, "difference": -0.1}, "small": {"n": 100, "changed": 0.4, "difference": 0.2}}
    changed, lost, won, count = changed_rows(scores)
    assert count == 400
    assert (400 * changed, 400 * lost, 400 * won) == pytest.approx((100, 55, 45))  # 45 and 10 lost, 15 and 30 won


def test_what_the_page_says_of_rows_scored_otherwise_is_so():
    """In words: distillation changes fewer rows on every task, and loses fewer; accuracy shows it with one optimizer only."""
    results = Results(RESULTS)
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
        line = next(line for line in answered_otherwise(results).splitlines() if line.startswith(f"| {ours} |"))
        assert f"| {100 * changed:.1f} ± " in line
    converted = {name: mean for name, mean in means.items() if not name.startswith(("zero-shot", "control"))}
    assert max(converted, key=converted.get) == "distill 15 chosen, own samples"


def test_pairs_that_diverged_or_were_not_scored_are_left_out():
    results = Results(RESULTS)
    lines = pairs(results).splitlines()
    results.pairs["runs"][0]["problem"] = "diverged"
    del results.pair_tasks["models"][results.pairs["runs"][1]["name"]]
    assert len(pairs(results).splitlines()) == len(lines) - 2


def test_what_the_page_says_of_pairs_is_so():
    """Distillation nearer in every pair: KL on every text, rows on every task. In the loss only with the text's help or all layers."""
    results = Results(RESULTS)
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
    page = (ROOT / "docs" / "adaptation.md").read_text(encoding="utf-8")
    said = " ".join(page.partition("### Nothing but the loss between them")[2].partition("\n### ")[0].split())
    kl = {name: run["to_original"]["wikitext2"] for name, run in runs.items()}
    rises = {name: run["after"]["wikitext2"]["loss"] - original for name, run in runs.items()}
    shares = {name: 100 * changed_rows(models[name])[0] for name in runs}
    means = {name: 20 * sum(models[name][task]["difference"] for task in TARGET_TASKS) for name in runs}
    alone, plain = (
        [f"{method} 15 {how}" for how in ("adamw, seed 0", "muon, seed 0", "muon, seed 1")] for method in ("distill", "sft")
    )
    ahead = [means[a] - means[b] for a, b in zip(alone, plain, strict=True)] + [
        means["recipe 15 muon, seed 0"] - means[plain[1]]
    ]
    assert abs(ahead[0]) < 0.1
    own = [runs[name]["to_original"]["samples_heldout"] for name in ours if " 15 " in name]
    control = runs["control adamw, seed 0"]["to_original"]
    assert abs(kl[alone[1]] - kl[alone[2]]) < abs(kl[plain[1]] - kl[plain[2]]) < 0.0055
    for sentence in (
        f"the KL is {kl[alone[0]]:.2f} against {kl[plain[0]]:.2f} with AdamW",
        f"{kl[alone[1]]:.2f} against {kl[plain[2]]:.2f} or {kl[plain[1]]:.2f} with Muon",
        f"with all layers {kl['distill 30 muon, seed 0']:.2f} against {kl['sft 30 muon, seed 0']:.2f}.",
        f"{min(shares[name] for name in alone):.1f} to {max(shares[name] for name in alone):.1f} % of the tasks' rows",
        f"against {min(shares[name] for name in plain):.1f} to {max(shares[name] for name in plain):.1f} %",
        f"{shares['distill 30 muon, seed 0']:.1f} against {shares['sft 30 muon, seed 0']:.1f} % with all layers",
        f"({min(rises[name] for name in alone):+.3f} to {max(rises[name] for name in alone):+.3f} against "
        f"{min(rises[name] for name in plain):+.3f} to {max(rises[name] for name in plain):+.3f})",
        f"({rises['recipe 15 muon, seed 0']:+.3f}, KL {kl['recipe 15 muon, seed 0']:.3f}, "
        f"{shares['recipe 15 muon, seed 0']:.1f} %)",
        f"{min(ahead[1:3]):.1f} to {means['distill 30 muon, seed 0'] - means['sft 30 muon, seed 0']:.1f} points ahead",
        f"the control is {control['wikitext2']:.3f} from the original on WikiText-2 and {control['samples_heldout']:.3f}",
        f"({min(own):.3f} to {max(own):.3f})",
    ):
        assert sentence in said, sentence


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(tmp_path):
    text = (ROOT / "docs" / "adaptation.md").read_text(encoding="utf-8")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    commands = [line for block in re.findall(r"^ *```bash\n(.*?)^ *```", text, re.S | re.M) for line in block.splitlines()]
    assert len(commands) == 7
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "ladder"
        done = subprocess.run(
            [sys.executable, "-m", "ladder_residual", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "stories-ladder-healed" / "model.safetensors").exists()
    assert (tmp_path / "stories-ladder-control" / "model.safetensors").exists()
    assert (tmp_path / "stories-corrected-healed" / "model.safetensors").exists()


def run_script(plan, demo_dir, tmp_path, asked):
    """``runs/adapt_smollm2.py`` on the shipped model and a CPU: the same plan, a few hundred tokens instead of millions."""
    encoder = Encoder(read_tokenizer(demo_dir), 512)
    (tmp_path / "stories.txt").write_text((demo_dir / "stories.txt").read_text(encoding="utf-8"), encoding="utf-8")
    ids = build_rows(str(tmp_path / "stories.txt"), encoder, 64, tmp_path / "made").ids.astype(np.uint16)
    (tmp_path / "rows").mkdir()
    for name, part in (("books", ids[:80]), ("books_heldout", ids[80:112]), ("wikitext2", ids[112:144])):
        np.save(tmp_path / "rows" / f"{name}.npy", part)
    for name, part in (("gsm8k", ids[40:80]), ("reference", ids[20:60])):
        np.save(tmp_path / "rows" / f"{name}.npy", part)
    words = [plan, "--model", str(demo_dir), "--rows", str(tmp_path / "rows"), "--work", str(tmp_path / "work")]
    words += (
        f"--device cpu --no-compile --million 64 --batch 64 --length 64 --rows-per-step 16 --out {tmp_path / 'out'}".split()
    )
    for name in asked:
        words += ["--run", name]
    done = subprocess.run(
        [sys.executable, ROOT / "runs" / "adapt_smollm2.py", *words, "--seconds", "240"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads((tmp_path / "out" / f"{plan}.json").read_text(encoding="utf-8"))
    return document, {run["name"]: run for run in document["runs"]}


@pytest.mark.slow
def test_next_token_runs_are_measured_against_the_original_too(demo_dir, tmp_path):
    asked = [f"{method} 15 adamw, seed 1" for method in ("distill", "sft")]
    _, runs = run_script("pairs", demo_dir, tmp_path, asked)
    assert list(runs) == asked
    distilled, plain = (runs[name] for name in asked)
    assert distilled["to_original"]["wikitext2"] == pytest.approx(distilled["after"]["wikitext2"]["kl"], rel=1e-3)
    assert plain["to_original"]["wikitext2"] > 0.01
    assert "kl" not in plain["after"]["wikitext2"]  # its own measure has no teacher


@pytest.mark.slow
def test_the_script_behind_the_results_runs(demo_dir, tmp_path):
    short = "distill 15 chosen, 4M"
    ends = ("", ", corrected teacher", ", corrected teacher alone, seed 2")
    asked = [*(short + end for end in ends), "distill 20 chosen, corrected teacher", "lora 15, 4M", "sft 15 muon, 4M"]
    asked += ["distill 15 chosen, own samples", "progressive 30, 4M"]
    document, runs = run_script("heal", demo_dir, tmp_path, asked)
    assert next(iter(runs)) == "control sft, 4M"
    assert set(runs) == {"control sft, 4M", *asked}
    assert runs["distill 15 chosen, own samples"]["settings"]["data"][0]["path"] == "samples"
    same = [runs[short + end]["before"]["wikitext2"]["loss"] for end in ends]
    assert max(same) == min(same)  # zero-shot is the original's weights, whatever ran before and whoever teaches
    assert all(run["problem"] is None for run in document["runs"])
    assert document["original"]["wikitext2"]["loss"] > 0
