"""Recipes: TOML, bases and changes, and values held to the annotations of a dataclass."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from ladder_residual.common.recipe import Range, build, check, override, read


@dataclass(frozen=True)
class Part:
    path: str
    weight: Annotated[float, Range(above=0, high=1)] = 1.0


@dataclass(frozen=True)
class Config:
    steps: Annotated[int, Range(1)]
    limit: Annotated[int | None, Range(2)] = None
    pair: tuple[float, float] = (0.0, 1.0)
    parts: tuple[Part, ...] = ()
    names: tuple[str, ...] = ()
    mode: Literal["slow", "fast"] = "slow"
    inner: Part = Part("x")
    quiet: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)


def test_values_become_what_the_annotations_say():
    document = {"steps": 3, "pair": [1, 2.5], "parts": [{"path": "a", "weight": 1}], "names": ["n"], "inner": {"path": "b"}}
    config = build(Config, document | {"limit": 2, "options": {"any": [1]}, "mode": "fast"}, "here")
    assert config.pair == (1.0, 2.5)
    assert isinstance(config.pair[0], float)
    assert config.parts == (Part("a", 1.0),)
    assert config.inner == Part("b")
    assert config.options == {"any": [1]}
    assert Config(1, parts=[Part("c")]).parts == (Part("c"),)  # made in Python


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stpes": 3}, r"here: unknown key stpes \(did you mean 'steps'\?\); known here: steps, limit"),
        ({"inner": {"pat": "x"}}, r"unknown key inner\.pat \(did you mean 'path'\?\)"),
        ({"inner": {}}, r"inner\.path is missing"),
        ({"inner": 3}, "inner must be a table, got 3"),
        ({"steps": "many"}, "steps must be a whole number, got 'many'"),
        ({"steps": True}, "steps must be a whole number, got True"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"limit": 1}, "limit must be at least 2, got 1"),
        ({"pair": [1.0]}, "pair must be a list of 2 values"),
        ({"pair": [1.0, "x"]}, r"pair\[1\] must be a number, got 'x'"),
        ({"parts": [{"path": "a", "weight": 0}]}, r"parts\[0\]\.weight must be above 0 and at most 1, got 0"),
        ({"parts": [{"path": "a", "weight": float("nan")}]}, r"parts\[0\]\.weight must be above 0"),
        ({"parts": "a"}, "parts must be a list, got 'a'"),
        ({"names": [1]}, r"names\[0\] must be text, got 1"),
        ({"mode": "fats"}, r"mode is 'fats' \(did you mean 'fast'\?\); choose from slow, fast"),
        ({"mode": ["fast"]}, "choose from slow, fast"),
        ({"quiet": 1}, "quiet must be true or false, got 1"),
        ({"options": []}, "options must be a table"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build(Config, {"steps": 1} | changes, "here")


def test_a_required_key_is_asked_for():
    with pytest.raises(ValueError, match="here: steps is missing"):
        build(Config, {}, "here")


def test_bases_are_merged_and_their_paths_stay_theirs(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.toml").write_text('name = "base"\n[data]\ntrain = "corpus"\nrows = 3\n')
    (tmp_path / "top.toml").write_text('base = "sub/base.toml"\n[data]\nrows = 4\nvalid = "/abs"\n')
    document = read(tmp_path / "top.toml", ("data.train", "data.valid"))
    assert document == {"data": {"train": str(tmp_path / "sub" / "corpus"), "rows": 4, "valid": "/abs"}}


def test_changes():
    document = {"run": {"steps": 1}}
    for text in ("run.steps=7", "data.valid=/abs", "optimizer.betas=[0.9, 0.99]", "name=bare word"):
        override(document, text)
    assert document == {
        "run": {"steps": 7}, "data": {"valid": "/abs"}, "optimizer": {"betas": [0.9, 0.99]}, "name": "bare word",
    }  # fmt: skip
    for text, message in (("run.steps", "--set takes a.b=value"), ("name.x=1", "name is no table")):
        with pytest.raises(ValueError, match=message):
            override(document, text)


@pytest.mark.parametrize(
    ("content", "message"),
    [("[model\n", "cannot read the recipe"), ('base = "r.toml"\n', "in a circle"), ("base = 3\n", "base must be the path")],
)
def test_files_that_cannot_be_read(tmp_path, content, message):
    (tmp_path / "r.toml").write_text(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "r.toml")
    with pytest.raises(ValueError, match="there is no recipe"):
        read(tmp_path / "none.toml")
