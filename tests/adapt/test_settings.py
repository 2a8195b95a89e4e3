"""Settings and recipes of a recovery run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ladder_residual.adapt.settings import AdaptSettings, read_recipe

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/adapt-*.toml")), ids=lambda path: path.stem)
def test_recipes_are_complete(path):
    recipe = read_recipe(path)
    assert recipe.teacher
    assert recipe.data
    shown = subprocess.run(
        [sys.executable, "-m", "ladder_residual", "adapt", str(path), "--show"], capture_output=True, text=True, timeout=60
    )
    assert json.loads(shown.stdout)["learning_rate"] == recipe.learning_rate


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("studnet = 'x'", r"unknown key studnet \(did you mean 'student'\?\)"),
        ("student = 'x'\ntokens = 'many'", "tokens must be a whole number"),
        ("student = 'x'\nmethod = 'magic'\nteacher='y'", "choose from distill, sft, lora"),
        ("student = 'x'", "name it with teacher"),
        ("teacher = 'x'", "student is missing"),
        (
            "student = 'x'\nteacher = 'y'\nsequence = 100\nbatch_tokens = 1000\n[[data]]\nweight = 2",
            r"data\[0\]\.path is missing",
        ),
        ("student = 'x'\nteacher = 'y'\nsequence = 300\nbatch_tokens = 1000", "use 900"),
        (
            "student = 'x'\nteacher = 'y'\nheldout = ['./a.txt']\n[[data]]\npath = 'a.txt'",
            r"./a.txt is both trained on \(data\) and measured on \(heldout\)",
        ),
        ("student = 'x'\nteacher = 'y'\ncontrol = true", "would learn from itself, and nothing: use method sft"),
        ("student = 'x'\nteacher = 'y'\nkeep = 1", "keep=1 is one checkpoint"),
        ("student = ", "cannot read the recipe"),
    ],
)
def test_mistakes_in_recipes_are_named(tmp_path, content, message):
    path = tmp_path / "recipe.toml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_recipe(path)


def test_the_result_lies_beside_the_student(tmp_path, monkeypatch):
    here = tmp_path / "model"
    (here / "inner").mkdir(parents=True)
    for student, folder in (("model", tmp_path), (".", here), ("..", here / "inner")):
        monkeypatch.chdir(folder)
        assert AdaptSettings(student=student, teacher="t").output.resolve() == tmp_path / "model-recovered"
    with pytest.raises(ValueError, match="student '/' has no name .*--out"):
        _ = AdaptSettings(student="/", teacher="t").output
