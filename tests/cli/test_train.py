"""The command line: a recipe run and exported as a user would, dry runs, and the benchmark on real ranks."""

import json
import re
from pathlib import Path

import pytest

from ladder_residual.train.dry_run import estimate
from ladder_residual.train.recipe import Recipe
from ladder_residual.train.speed import flops_per_token, peak_tflops
from tests.forked import run_program
from tests.tiny_training import tiny_corpus, trained_losses

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


@pytest.mark.slow
def test_a_recipe_on_two_ranks_exported_and_generating(tmp_path):
    """From the shipped recipe to text, through the launcher."""
    tiny_corpus(tmp_path / "corpus")
    run, settings = tmp_path / "run", ["--set", "run.steps=3", "--set", "optimizer.warmup=1", "--set", "run.device=cpu"]
    settings += ["--set", f"data.train={tmp_path / 'corpus'}", "--set", f"data.valid={tmp_path / 'corpus'}"]
    settings += ["--set", f"checkpoint.directory={run}", "--set", "parallel.tp=2", "--set", "log.every=1"]
    done = run_program("train", RECIPES / "train-tiny-ladder.toml", *settings, "--ranks", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["step"] == 3
    assert "step 3/3  loss" in done.stderr
    assert len(trained_losses(run)) == 3
    assert list((run / "tensorboard").iterdir())
    assert Path(result["export"], "model.safetensors").exists()
    done = run_program(
        "train", "export", run, tmp_path / "out", "--dtype", "float16", "--tokenizer", ROOT / "src/ladder_residual/assets/demo"
    )
    assert done.returncode == 0, done.stderr
    done = run_program("generate", tmp_path / "out", "--prompt", "Once", "-n", "2", "--device", "cpu", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert "[ladder, 1 process, cpu] 2 tokens" in done.stderr


def test_mistakes_are_one_line(tmp_path):
    done = run_program("train", RECIPES / "train-tiny-ladder.toml", "--set", "run.step=3")
    assert done.returncode == 2
    assert "known here: steps, seed, precision" in done.stderr
    assert "unknown key run.step (did you mean 'steps'?)" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    tiny_corpus(tmp_path / "corpus")
    words = [
        "--set",
        f"data.train={tmp_path / 'corpus'}",
        "--set",
        "data.valid=",
        "--set",
        "batch.rows=9",
        "--set",
        "run.device=cpu",
    ]
    done = run_program("train", RECIPES / "train-tiny-ladder.toml", *words, "--ranks", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: batch.rows 9 is not divisible by the 2 data-parallel ranks; use a multiple of 2"


LARGE = sorted(path.stem.removeprefix("train-") for path in RECIPES.glob("train-[0-9]b-*.toml"))


@pytest.mark.parametrize("name", LARGE)
def test_recipes_of_the_paper_fit_their_machines(name):
    plan = estimate(Recipe.load(RECIPES / f"train-{name}.toml"), device="h100")
    assert plan["ranks"] == {"1b": 64, "3b": 128, "8b": 64}[name[:2]]
    assert plan["tokens_per_step"] == 4_194_304
    assert plan["steps"] == 25_000
    assert plan["fits"]
    assert 0.2 < plan["mfu"] < 0.6


def test_neighbours_differ_only_in_the_wiring():
    for path in RECIPES.glob("train-*.toml"):
        size, _, wiring = path.stem.removeprefix("train-").partition("-")
        standard = Recipe.load(RECIPES / f"train-{size}-standard.toml").to_dict()
        neighbour = Recipe.load(path).to_dict()
        assert neighbour["model"].pop("wiring").startswith("ladder" if wiring == "hybrid" else wiring)
        assert standard["model"].pop("wiring") == "standard"
        if wiring in ("desync", "delayed"):
            assert neighbour["parallel"].pop("emulate_ranks") == 2
            del standard["parallel"]["emulate_ranks"]
        neighbour["name"] = standard["name"]
        assert neighbour == standard, path.name


def test_what_a_dry_run_says():
    plans = {
        wiring: estimate(Recipe.load(RECIPES / "train-8b-standard.toml", [f"model.wiring={wiring}"]), link="nccl-no-p2p")
        for wiring in ("standard", "ladder", "parallel", "desync-4x")
    }
    seconds = {wiring: plan["step_seconds"] for wiring, plan in plans.items()}
    assert seconds["standard"] > seconds["ladder"]
    assert seconds["standard"] > seconds["parallel"] > seconds["desync-4x"]
    assert plans["standard"]["step_ms"]["tensor_hidden"] == 0
    assert plans["ladder"]["step_ms"]["tensor_hidden"] > 0
    small = Recipe.load(RECIPES / "train-8b-standard.toml", ["parallel.tp=1", "parallel.dp=1", "batch.rows=2"])
    assert not estimate(small)["fits"]  # 8 B parameters and their moments on one device
    with pytest.raises(ValueError, match="3 ranks do not fit parallel.dp 8 x parallel.tp 8"):
        estimate(Recipe.load(RECIPES / "train-8b-standard.toml"), ranks=3)
    done = run_program("train", RECIPES / "train-1b-ladder.toml", "--dry-run")
    assert "104.86 B tokens" in done.stdout
    assert "planned, not measured" in done.stdout


def test_flops_of_a_known_model():
    shape = Recipe.load(RECIPES / "train-1b-standard.toml").model.shape()
    matrices = 40 * (4 * 1536 * 1536 + 3 * 1536 * 4096) + 49152 * 1536
    assert flops_per_token(shape, 2048) == 6 * matrices + 3 * 40 * 4 * 1536 * 2049 / 2
    assert peak_tflops("NVIDIA H200") == 990
    assert peak_tflops("AMD EPYC") is None


@pytest.mark.slow
def test_bench_train_on_ranks():
    words = ["--model", "smollm2-135m", "--layers", "2", "--vocabulary", "512", "--sequence", "16", "--batch", "2", "--tp", "3"]
    done = run_program(
        "bench", "train", *words, "--links", "none;2ms", "--wirings", "ladder,delayed-1", "--repeats", "3", "--device", "cpu"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["benchmark"], result["tp"], result["emulated"], result["message_bytes"]) == (
        "train",
        3,
        False,
        2 * 16 * 576 * 4,
    )
    assert [row["wiring"] for row in result["rows"]] == 2 * ["standard", "ladder", "delayed-1", "no-comm"]
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in result["rows"])
    # Five all-reduces forward and five backward of 2 ms each cannot be faster than that where nothing hides them.
    assert result["rows"][4]["median_ms"] > 20
    done = run_program("bench", "train", "--wirings", "parallel", "--device", "cpu", "--tp", "2")
    assert "parallel needs weights of its own" in done.stderr


def test_the_recipes_that_the_guide_names_exist():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    names = re.findall(r"`(train-[a-z0-9*{},-]+)`", page)
    assert len(names) >= 5
    for name in names:
        for variant in re.findall(r"[a-z]+", name.partition("{")[2]) or [""]:
            assert list(RECIPES.glob(name.partition("{")[0] + variant + ".toml")), name
