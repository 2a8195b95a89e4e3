"""Recipes: what they may say, what is refused, the schedule, and every shipped recipe."""

import math
from pathlib import Path

import pytest

from ladder_residual.train.layout import degrees, rows_per_rank
from ladder_residual.train.recipe import Optimizer, Recipe
from ladder_residual.train.schedule import lr_share

SMALL = """
[model]
hidden_size = 64
intermediate_size = 96
num_layers = 4
num_heads = 4
vocab_size = 512
"""


def written(tmp_path, text, name="r.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_recipe_and_its_neighbour(tmp_path):
    written(tmp_path, SMALL + '[data]\ntrain = "corpus"\n[optimizer]\nlr = 1\nbetas = [0.9, 0.99]\n', "base.toml")
    path = written(tmp_path, 'base = "base.toml"\n[model]\nwiring = "ladder:last-half"\n', "ladder.toml")
    recipe = Recipe.load(path, ["run.steps=7", "data.valid=/abs", "optimizer.schedule=wsd", "model.num_kv_heads=2"])
    assert (recipe.name, recipe.wiring.spec, recipe.run.steps) == ("ladder", "ladder:2-3", 7)
    assert recipe.data.train == str(tmp_path / "corpus")  # relative to the recipe that names it
    assert recipe.data.valid == "/abs"
    assert recipe.optimizer.betas == (0.9, 0.99)
    assert recipe.optimizer.lr == 1.0
    assert recipe.model.shape().num_kv_heads == 2
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("[run]\nstep = 3", r"unknown key run\.step \(did you mean 'steps'\?\); known here: steps, seed"),
        ("[optimiser]\nlr = 1", r"unknown key optimiser \(did you mean 'optimizer'\?\)"),
        ('[run]\nsteps = "many"', r"run\.steps must be a whole number, got 'many'"),
        ("[run]\nsteps = true", r"run\.steps must be a whole number, got True"),
        ("[run]\nsteps = 0", r"run\.steps must be at least 1, got 0"),
        ("[optimizer]\nbetas = [0.9]", r"optimizer\.betas must be a list of 2 values"),
        ("[optimizer]\nbetas = [0.9, 1.0]", r"optimizer\.betas\[1\] must be at least 0 and below 1, got 1"),
        ("[optimizer]\nlr = -1", r"optimizer\.lr must be at least 0 and at most 10, got -1"),
        ('[optimizer]\nschedule = "cosin"', r"did you mean 'cosine'\?"),
        ("[optimizer]\nwarmup = 1000", r"warmup is 1000 steps, but the run has only 100"),
        ('[run]\nprecision = "fp8"', r"run\.precision is 'fp8'; choose from bf16, fp32"),
        ("data = 3", r"data must be a table, got 3"),
        ("[parallel]\nemulate_ranks = 2\ntp = 2", r"stands in for real ranks, so parallel\.tp must be 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, extra, message):
    text = extra + SMALL if extra.startswith("data") else SMALL + extra
    with pytest.raises(ValueError, match=message):
        Recipe.load(written(tmp_path, text))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('wiring = "ladder:4"', "names layer 4, but the model has 4 layers"),
        ('wiring = "no-comm"', "cannot be trained"),
        ('wiring = "desync-2x@4"', "was made for tp=4, this run has tp=1"),
        ('family = "lama"', "did you mean 'llama'"),
        ('preset = "ladder-1c"', "unknown preset 'ladder-1c' .did you mean 'ladder-1b'"),
        ("num_heads = 7", "give model.head_dim"),
    ],
)
def test_models_that_cannot_be(tmp_path, model, message):
    text = SMALL.replace("num_heads = 4\n", "") if "num_heads" in model else SMALL
    with pytest.raises(ValueError, match=message):
        Recipe.load(written(tmp_path, text + model + ("\nnum_heads = 4\n" if "num_heads" not in text + model else "\n")))


def test_files_and_changes_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="there is no recipe"):
        Recipe.load(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="cannot read the recipe"):
        Recipe.load(written(tmp_path, "[model\n"))
    with pytest.raises(ValueError, match=r"model is missing"):
        Recipe.load(written(tmp_path, ""))
    with pytest.raises(ValueError, match=r"model\.hidden_size is missing"):
        Recipe.load(written(tmp_path, "[model]\nnum_layers = 2\n"))
    with pytest.raises(ValueError, match="in a circle"):
        Recipe.load(written(tmp_path, 'base = "r.toml"\n'))
    with pytest.raises(ValueError, match="--set takes a.b=value"):
        Recipe.load(written(tmp_path, SMALL), ["run.steps"])


def test_numbers_of_ranks_that_do_not_fit():
    assert degrees(8, 2, None) == (4, 2)
    assert rows_per_rank(16, 4, None) == (4, 4)
    with pytest.raises(ValueError, match="6 rank"):
        degrees(6, 4, None)
    with pytest.raises(ValueError, match=r"8 rank.*start 4"):
        degrees(8, 2, 2)
    with pytest.raises(ValueError, match=r"batch\.rows 10 is not divisible by the 4 data-parallel ranks"):
        rows_per_rank(10, 4, None)
    with pytest.raises(ValueError, match=r"micro_rows 3 does not divide the 4 rows"):
        rows_per_rank(16, 4, 3)


def test_schedules():
    cosine = Optimizer(warmup=10, final_lr=0.1)
    shares = [lr_share(step, 100, cosine) for step in range(100)]
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert shares[10] == 1.0
    assert shares[-1] == pytest.approx(0.1)
    assert shares[54] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 44 / 89)))
    wsd = Optimizer(warmup=10, final_lr=0.0, schedule="wsd", decay=0.2)
    shares = [lr_share(step, 100, wsd) for step in range(100)]
    assert shares[10:80] == [1.0] * 70
    assert shares[-1] == 0.0
    assert shares[89] == pytest.approx(0.5)
    assert lr_share(99, 100, Optimizer(schedule="constant")) == 1.0


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "recipes").glob("train-*.toml")), ids=lambda path: path.stem
)
def test_shipped_recipes_load(path):
    recipe = Recipe.load(path)
    assert recipe.name == path.stem
