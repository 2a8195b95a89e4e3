"""The command as a whole: its help, and what it does with mistakes."""

import os
import shlex
import subprocess
import sys

import pytest
from rich.text import Text
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

from ladder_residual.cli import bench
from ladder_residual.cli.main import COMMANDS, EXAMPLES, app, main
from ladder_residual.cli.options import split_links, split_wirings
from ladder_residual.distributed.link_probe import SMALL_ALLREDUCE
from ladder_residual.distributed.reducers import COMM_DTYPES
from ladder_residual.engine import KV_CACHE_DTYPES, REAL_REDUCERS
from ladder_residual.engine.schedule import SCHEDULES
from ladder_residual.generation.request import ENGINES
from ladder_residual.models.preflight import DTYPES


def test_help_lists_the_commands_in_groups():
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120", "TERM": "dumb"}).output
    places = [text.index(title) for title in COMMANDS]
    assert places == sorted(places)
    names = [name for group in COMMANDS.values() for name in group]
    assert len(names) == 13
    listed = [line.split()[1] for line in text.splitlines() if line.startswith(("│", "|")) and line.split()[1] in names]
    assert listed == names


def leaves(command, words=("ladder",)):
    """Every command below ``command``, with its words."""
    for name, below in getattr(command, "commands", {}).items():
        yield from leaves(below, (*words, name))
    yield words, command


def test_help_says_everything_and_keeps_its_brackets():
    for words, command in leaves(get_command(app)):
        for param in command.params:
            text = getattr(param, "help", None) or ""
            assert text or param.name == "help", f"{words} {param.opts}: no help"
            assert Text.from_markup(text).plain == text, f"{words} {param.opts}: rich takes a part for markup"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_command_is_in_its_help_and_parses(name):
    text = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "160", "TERM": "dumb"}).output
    assert EXAMPLES[name] in text
    program, *words = shlex.split(EXAMPLES[name])
    assert program == "ladder"
    assert " ".join(words).startswith(name)
    tree, called = get_command(app), []
    for _, command in leaves(tree):
        if not hasattr(command, "commands"):
            command.callback = lambda **given: called.append(given)
    tree.main(words, standalone_mode=False)  # UsageError if an option or argument is wrong
    assert len(called) == 1


RUN = [
    "demo",
    "plan",
    "convert",
    "inspect",
    "generate",
    "data prepare",
    "data inspect",
    "data sample",
    "adapt",
    "eval",
    "trace plan",
]


@pytest.mark.slow
def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in RUN:
        words = shlex.split(EXAMPLES[name])[1:]
        if "--tp" in words and name == "generate":
            done = subprocess.run(
                [sys.executable, "-m", "ladder_residual", *words], capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("Once upon a time")
        else:
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, (name, done.output, done.exception)


def test_shell_completion():
    done = subprocess.run(
        [sys.executable, "-m", "ladder_residual"],
        env=os.environ | {"_PYTHON_M_LADDER_RESIDUAL_COMPLETE": "complete_bash", "COMP_WORDS": "ladder gen", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "generate" in done.stdout, done.stderr


def test_options_offer_what_the_library_takes():
    """The command line has its own lists, because it does not import torch."""
    command = dict(leaves(get_command(app)))["ladder", "generate"]
    offered = {param.name: param for param in command.params}
    for name, known in {
        "engine": ENGINES,
        "schedule": ("auto", *SCHEDULES),
        "reducer": REAL_REDUCERS,
        "kv_cache_dtype": KV_CACHE_DTYPES,
        "dtype": ("auto", *DTYPES),
        "comm_dtype": COMM_DTYPES,
        "small_allreduce": SMALL_ALLREDUCE,
        "device": ("auto", "cpu", "cuda"),
    }.items():
        given = [item.value for item in offered[name].shell_complete(Context(command), "")]
        assert sorted(given) == sorted(known), name


def test_version():
    assert CliRunner().invoke(app, ["--version"]).output.startswith("ladder-residual ")


def test_lists_in_options():
    assert split_wirings("standard,ladder:0,2-3,desync-2x") == ["standard", "ladder:0,2-3", "desync-2x"]
    assert split_wirings("ladder:first-2,last-2,standard") == ["ladder:first-2,last-2", "standard"]
    assert split_links("none,24us,no-pdl;alpha=12,beta=90,no-pdl") == ["none", "24us,no-pdl", "alpha=12,beta=90,no-pdl"]
    for split in (split_wirings, split_links):
        with pytest.raises(ValueError, match="an empty name between"):
            split("a,,b")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "DEMO", "-p", "\udcff"], "not valid text"),
        (["generate", "DEMO", "-p", "x", "--seed", "99999999999999999999"], "seed must be between"),
        (["convert", "DEMO", "/proc/x", "--wiring", "ladder"], "cannot write /proc/x: "),
        (["generate", "DEMO", "-p", "x", "--engine", "cuda"], "use --engine auto or torch"),
        (["generate", "DEMO", "-p", "x", "--device", "cuda"], "use --device cpu"),
        (["generate", "DEMO", "-p", "x", "--reducer", "symm"], "leave it out"),
        (
            ["generate", "DEMO", "-p", "x", "--kv-cache-dtype", "fp8"],
            "fp8 is the CUDA engine's, which needs a GPU: leave it out",
        ),
        (["bench", "e2e", "--model", "DEMO", "--kv-cache-dtype", "fp8"], "fp8 is the CUDA engine's, which needs a GPU"),
        (["bench", "decode", "--model", "DEMO", "--tp", "2", "--prompt", "-5", "--new", "2"], "--context must be at least 1"),
        (["bench", "prefill", "--model", "DEMO", "--tp", "2", "--prompt", "0"], "--prompt must be at least 1, got 0"),
        (["bench", "e2e", "--model", "DEMO", "--tp", "2", "--new", "0"], "--new must be at least 1, got 0"),
        (["bench", "decode", "--model", "DEMO", "--tp", "1"], "use --tp 2 or more"),
        (["bench", "decode", "--model", "DEMO", "--tp", "2", "--gemm-backend", "triton"], "are the CUDA engine's"),
        (["bench", "overlap", "--latency", "5"], "no unit"),
        (["bench", "overlap", "--model", "llama-9"], "unknown preset"),
        (["bench", "decode", "--batch", "1,x", "--device", "cpu"], "--batch takes whole numbers"),
        (["bench", "prefill", "--device", "cuda"], "torch sees no CUDA device"),
        (["bench", "e2e", "--batch", "1,x"], "--batch takes whole numbers"),
        (["bench", "prefill", "--links", "h200-nccl", "--device", "cpu", "--tp", "1"], "need a GPU"),
        (["generate", "DEMO", "-p", "x", "--emulate", "tp=2,link=24us"], "needs the CUDA engine and a GPU"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(arguments, named, demo_dir, tmp_path, monkeypatch, capfd):
    words = [str(demo_dir) if word == "DEMO" else str(tmp_path / "x") if word == "OUT" else word for word in arguments]
    monkeypatch.setattr(sys, "argv", ["ladder", *words])  # the entry point in this process: a start of Python costs seconds
    with pytest.raises(SystemExit) as ended:
        main()
    check_mistake(ended.value.code, capfd.readouterr().err, named)


def check_mistake(code, stderr, named):
    assert code == 2, stderr[-2000:]
    errors = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, stderr[-2000:]
    assert named in errors[0]
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("terminal", "asked", "printed"), [(True, False, ""), (True, True, '{"a": 1}\n'), (False, False, '{"a": 1}\n')]
)
def test_the_json_line_of_a_benchmark_is_for_programs(monkeypatch, capsys, terminal, asked, printed):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    bench.print_json({"a": 1}, asked)
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("command", "ranks"), [("generate", "(1)"), ("bench overlap", "2"), ("bench decode", "8"), ("trace run", "2")]
)
def test_the_help_shows_how_many_ranks_are_started(command, ranks):
    said = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"}).output
    [line] = [line for line in Text.from_ansi(said).plain.splitlines() if " --tp " in line and "Tensor-parallel" in line]
    assert f"[default: {ranks}]" in line
