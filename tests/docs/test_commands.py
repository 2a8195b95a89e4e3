"""Every command that README and the docs name exists; those of the guides run."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lab.hosts.delayed_link import why_not
from ladder_residual.cli.main import app, main
from tests.docs.pages import PAGES, ROOT, blocks, commands, inline_code, text_of

DOCS = ROOT / "docs"
BIN = Path(sys.executable).parent
SHELLS = ("bash", "sh", "")


def parse(words: list[str]) -> None:
    """What `ladder` would do with these words, up to the command's own code."""
    command, context, rest = typer.main.get_command(app), None, words
    while True:
        context = command.make_context(command.name or "ladder", list(rest), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        _, command, rest = command.resolve_command(context, rest)


@cache
def known_options(*names: str) -> set[str]:
    """The options of a subcommand and of the groups above it; empty if there is none of this name."""
    command, found = typer.main.get_command(app), set()
    for name in names:
        command = getattr(command, "commands", {}).get(name)
        if command is None:
            return set()
        found |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        default = getattr(command, "commands", {}).get("run")  # `ladder train RECIPE` is `ladder train run RECIPE`
        found |= {option for parameter in (default.params if default else ()) for option in parameter.opts}
    return found | {"--help"}


def check_module(words: list[str]) -> None:
    """`python -m MODULE ...`: the module is there and knows the options."""
    module, *rest = words
    if module.endswith(".NAME"):
        return
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    source = importlib.util.find_spec(f"{module}.__main__") if spec.submodule_search_locations else spec
    assert source is not None, f"{module} cannot be run"
    if module in ("ladder_residual", "pytest"):
        return
    text = (
        inspect.getsource(importlib.import_module(source.name))
        if source.name.startswith("lab.")
        else text_of(Path(source.origin))
    )
    if module == "lab.hosts.train":  # hands them on to `ladder bench train`
        assert {word for word in rest if word.startswith("--")} <= known_options("bench", "train") | {"--link", "--out"}
        return
    for word in rest:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            assert word in text or re.search(rf"\b{name}:", text), f"python -m {module} does not know {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_those_of_the_command_line(page):
    text = text_of(page)
    for words in commands(text, *SHELLS):
        if words[0] == "ladder":
            parse(words[1:])
        elif words[:2] == ["python", "-m"]:
            check_module(words[2:])
        elif words[0] == "torchrun":
            assert "-m" in words
            parse(words[words.index("-m") + 2 :])
        else:
            shell = {"make", "pip", "vllm", "curl", "python", "git", "cd", "source", "export", "mkdir", "echo"}
            assert words[0] in {*shell, "nvidia-cuda-mps-control"} or "/" in words[0], words
    for code in inline_code(text):
        check_inline(code)


def check_inline(code: str) -> None:
    """A command within a sentence may be incomplete: its name and its options must be known."""
    try:
        words = shlex.split(code)
    except ValueError:  # an apostrophe in words that are no command
        return
    if words[:1] == ["torchrun"] and "-m" in words:
        words = words[words.index("-m") :]
        words = ["ladder", *words[2:]] if words[1] == "ladder_residual" else []
    if words[:2] == ["python", "-m"]:
        check_module(words[2:])
    elif words[:1] == ["ladder"] and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]):
        names = [words[1], *(words[2:3] if words[2:3] and known_options(words[1], words[2]) else [])]
        known = known_options(*names)
        assert known, f"there is no command in {code!r}"
        unknown = {word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)} - known
        assert not unknown, f"{code!r}: {unknown}"


def test_unknown_commands_and_options_are_found():
    for words in (["nothing"], ["plan", "--nothing"], ["bench", "nothing"], ["generate"]):
        with pytest.raises(Exception, match="nothing|No such|Missing"):
            parse(words)
    with pytest.raises(AssertionError, match="no command"):
        check_inline("ladder heal DIR")
    with pytest.raises(AssertionError, match="--exchange"):
        check_inline("ladder generate --exchange measured")
    with pytest.raises(AssertionError, match="does not know --nothing"):
        check_module(["lab.reports", "--nothing"])


# The guides' commands run as written in test_guides.py, which is slow. Here: quickly, in this process, and those that need a GPU or root.


def test_commands_of_the_evaluation_guide_run(tmp_path, monkeypatch, capsys):
    text = text_of(DOCS / "evaluation.md")
    for name, content in blocks(text, "jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    printed = []
    for words in commands(text, "bash"):
        if "--tp" in words:
            words = words[: words.index("--tp")]  # two ranks: tests/evaluate
        if words[0] == "ladder":
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, (words, done.exception)
            printed.append(done.stdout)
        else:
            monkeypatch.setattr(sys, "argv", words[2:])
            importlib.import_module(words[2]).main()
            printed.append(capsys.readouterr().out)
    for _, example in blocks(text, "python"):
        exec(compile(example, "evaluation.md", "exec"), {})
    assert any("| piqa | 0 | 4 | acc_norm |" in page for page in printed)
    assert any("| task | shots | rows | before | zero-shot |" in page for page in printed)
    # A checkpoint, its stored result, and scores made elsewhere: the same comparison three times.
    rows = [[line for line in page.splitlines() if line.startswith("| piqa")] for page in printed if "| difference |" in page]
    assert len(rows) == 3
    assert rows[0] == rows[1] == rows[2]


NEEDS_GPU = ("needs a GPU", "needs the CUDA engine and a GPU", "no CUDA device", "needs a CUDA device")


@pytest.mark.parametrize("words", commands(text_of(DOCS / "engine.md"), "bash"), ids=" ".join)
def test_commands_of_the_engine_guide_ask_for_a_gpu(words, demo_dir, monkeypatch, capfd):
    """Without one: understood, and refused for the lack of it."""
    words = [str(demo_dir) if word == "SRC" else word.replace("tp=8,link", "tp=2,link") for word in words]
    if words[1] == "generate" and "--tp" in words:
        words = words[: words.index("--tp")]  # eight processes that each say what one says
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capfd.readouterr().err
    assert any(reason in printed for reason in NEEDS_GPU), printed[-500:]


def run_as_written(words, folder):
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr
    return done.stdout


# By module: what to say instead, so that it takes seconds.
SHORTER = {
    "lab.faults": ["--rounds", "0", "--named", "none"],
    "lab.soak": ["--requests", "60"],
    "lab.fuzz": ["--inputs", "18", "--workers", "1"],
    "lab.hosts": ["--repeats", "5", "--layers", "2", "--prompt", "4", "--prefill-prompt", "4", "--phases", "decode"],
}
LAB = [
    words
    for name in ("hosts", "operations", "security")
    for words in commands(text_of(DOCS / f"{name}.md"), "bash")
    if words[0] == "python"
]


@pytest.mark.slow
@pytest.mark.parametrize("words", LAB, ids=" ".join)
def test_lab_commands_run(words, tmp_path):
    """The long ones with less to do, and the same words otherwise."""
    if words[2] == "lab.hosts" and why_not():
        pytest.skip(f"no link can be made here: {why_not()}")
    words = [sys.executable, *words[1:], *SHORTER[words[2]]]  # the last of two equal options counts
    words = ["smollm2-135m" if word == "smollm2" else word for word in words]  # the shape, where the checkpoint was not fetched
    if "--links" in words:
        words[words.index("--links") + 1] = "1ms/1gbit"
    words = [str(tmp_path / Path(word).name) if word.startswith("results/") else word for word in words]
    printed = run_as_written(words, ROOT)
    if "--out" in words:
        assert json.loads(Path(words[words.index("--out") + 1]).read_text()) == json.loads(printed.splitlines()[-1])


def test_every_lab_campaign_is_in_a_guide():
    assert {words[2] for words in LAB} == set(SHORTER)
