"""The Python API: what ``dir`` and ``help`` show, every docstring's example, and calls on several ranks from a plain process."""

import doctest
import inspect
import os
import pydoc
import subprocess
import sys

import pytest

import ladder_residual as ladder

FUNCTIONS = [name for name in ladder.__all__ if name not in ("Wiring", "__version__")]
GREEDY = {"max_new_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the examples run: the shipped model and its conversion."""
    folder = tmp_path_factory.mktemp("api")
    ladder.export_demo(folder / "stories")
    ladder.convert(folder / "stories", folder / "stories-ladder", "ladder:last-half")
    return folder


@pytest.fixture
def stories(folder, monkeypatch):
    monkeypatch.chdir(folder)


def run(code, folder, **environment):
    command = [sys.executable, *code] if isinstance(code, list) else [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=120)


def test_dir_shows_the_api_and_importing_or_planning_brings_no_torch(tmp_path):
    assert set(dir(ladder)) >= set(ladder.__all__)
    code = (
        "import sys, ladder_residual as ladder; assert set(ladder.__all__) <= set(dir(ladder));"
        "ladder.plan('llama-3-70b'); ladder.Wiring; print({'torch', 'transformers', 'typer'} & set(sys.modules))"
    )
    done = run(code, tmp_path)
    assert done.stdout == "set()\n", done.stderr


def test_help_has_every_function_with_its_signature():
    text = pydoc.plain(pydoc.render_doc(ladder))
    for name in FUNCTIONS:
        assert f"{name}({next(iter(inspect.signature(getattr(ladder, name)).parameters))}:" in text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_typed_and_say_what_they_take(name):
    function = getattr(ladder, name)
    signature, text = inspect.signature(function), inspect.getdoc(function)
    assert signature.return_annotation is not signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not parameter.empty, parameter.name
        assert f"\n    {'**' if parameter.kind is parameter.VAR_KEYWORD else ''}{parameter.name}: " in text
    assert "\nReturns:\n" in text


def test_a_package_of_the_same_name_does_not_replace_a_function():
    import ladder_residual.adapt.select
    import ladder_residual.evaluate.results
    import ladder_residual.plan.planner  # noqa: F401

    for name in FUNCTIONS:
        assert inspect.isfunction(getattr(ladder, name)), name


@pytest.mark.parametrize("name", ["", "Wiring", *FUNCTIONS])
def test_the_example_of_a_docstring_runs(name, stories):
    documented = getattr(ladder, name) if name else ladder
    example = doctest.DocTestParser().get_doctest(
        inspect.getdoc(documented), {name: getattr(ladder, name) for name in ladder.__all__}, name or "ladder_residual", None, 0
    )
    assert example.examples
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)


@pytest.mark.slow
def test_several_ranks_start_for_a_call_and_say_what_one_process_says(stories):
    """Launcher, ranks and JSON: the slow twin is the same call on one process."""
    prompts = ["Once upon a time", "The dog"]
    one = ladder.generate("stories-ladder", prompts, **GREEDY)
    assert ladder.generate("stories-ladder", prompts, tp=2, device="cpu", **GREEDY) == one
    assert ladder.generate(ladder.load("stories-ladder"), prompts, **GREEDY) == one


@pytest.mark.slow
def test_an_evaluation_on_several_ranks_is_that_of_one(stories):
    asked = {"perplexity": "stories/stories.txt", "context": 128, "stride": 128, "device": "cpu"}
    one, two = (ladder.evaluate("stories-ladder", tp=tp, **asked) for tp in (1, 2))
    assert (one["tp"], two["tp"]) == (1, 2)
    assert two["perplexity"]["nats_per_token"] == pytest.approx(one["perplexity"]["nats_per_token"], rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ladder.load("stories", tp=2), r"torchrun --nproc-per-node 2, or let generate\(\.\.\., tp=2\)"),
        (lambda: ladder.load("stories", tp=0), "tp must be at least 1, got 0"),
        (lambda: ladder.generate("stories", "x", tp=3), "tp=3 does not divide 8 query heads"),
        (lambda: ladder.generate("stories", []), "there is no prompt"),
        (lambda: ladder.generate(ladder.load("stories"), "x", wiring="ladder"), "the model is loaded already"),
        (lambda: ladder.evaluate("stories"), "nothing to do"),
        (lambda: ladder.evaluate("stories", perplexity="stories/stories.txt", tp=16), "tp=16 is more than the model"),
        (lambda: ladder.adapt("stories", teacher="stories", data="x.txt", tokns=1), "did you mean 'tokens'"),
        (lambda: ladder.select_layers("stories", "stories/stories.txt"), "layers"),
        (lambda: ladder.select_layers("stories", "stories/stories.txt", layers=9), "cannot convert 9 layers .* choose 1 to 5"),
        (lambda: ladder.rewire("stories", "ladder"), "takes a transformers model, got 'stories': convert rewires"),
        (lambda: ladder.plan("llama-3-70b", tp=3), "tp=3 does not divide"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(call, message, stories, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_what_ranks_refuse_is_a_value_error_of_the_caller(stories):
    with pytest.raises(ValueError, match="exceed the model's context of 512"):
        ladder.generate("stories", "Once upon a time", tp=2, max_new_tokens=1000)
