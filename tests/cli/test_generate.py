"""``ladder generate`` and ``ladder chat`` as users start them: one process, ranks, torchrun, signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings

import pytest

from ladder_residual.cli.main import main
from ladder_residual.common.locks import Lock
from ladder_residual.distributed.world import World
from ladder_residual.generation.sampling import Sampling
from ladder_residual.generation.session import LoadOptions, Session
from ladder_residual.models.convert import convert
from tests.forked import Program, run_program
from tests.ranks import free_port

PROMPTS = ["Once upon a time, there was a little girl", "The cat"]


def ladder(*arguments, check=True, timeout=240, **options):
    words = [sys.executable, "-m", "ladder_residual", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def texts(demo_dir):
    """Of the last half of the layers rewired, greedy, in this process."""
    session = Session(demo_dir, World(), Sampling(max_new_tokens=30, temperature=0), LoadOptions(wiring="ladder:last-half"))
    session.load_for(PROMPTS)
    return [completion.text for completion in session.complete(PROMPTS)]


def test_one_process_prints_the_text(demo_dir, texts):
    done = run_program("generate", demo_dir, "--wiring", "ladder:last-half", "-p", PROMPTS[0], "-n", "30", "--temperature", "0")
    assert done.stdout == PROMPTS[0] + texts[0] + "\n"
    assert "[ladder:3-4, 1 process, cpu] 30 tokens in" in done.stderr


def test_two_ranks_write_the_same_text(demo_dir, tmp_path, texts):
    convert(demo_dir, tmp_path / "half", "ladder:last-half")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    words = ("generate", tmp_path / "half", "--file", tmp_path / "prompts.txt", "--out", tmp_path / "out.jsonl")
    done = run_program(*words, "--tp", "2", "-n", "30", "--temperature", "0")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["text"]) for row in rows] == list(zip(PROMPTS, texts, strict=True))
    assert all(row["new_tokens"] >= 1 for row in rows)
    assert "[ladder:3-4, 2 ranks, cpu]" in done.stderr


def test_ranks_of_another_launcher_are_the_same_as_tp(demo_dir, texts):
    """Started alike, in the environment that torchrun sets."""
    words = ["generate", demo_dir, "--wiring", "ladder:last-half", "-p", PROMPTS[0], "-n", "30", "--temperature", "0"]
    given = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [Program(*words, env=given | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0], ranks[0].stderr[-2000:]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.stdout for rank in ranks] == [PROMPTS[0] + texts[0] + "\n", ""]


@pytest.mark.slow
def test_torchrun_is_the_same_as_tp(demo_dir, texts):
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ladder_residual", "generate"]
    words += [str(demo_dir), "--wiring", "ladder:last-half", "-p", PROMPTS[0], "-n", "30", "--temperature", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert PROMPTS[0] + texts[0] in done.stdout


def test_beams_are_printed_at_the_end(demo_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ladder", "generate", str(demo_dir), "-p", PROMPTS[0], "-n", "8", "--num-beams", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(PROMPTS[0] + " ")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_here(monkeypatch, "generate", demo_dir, "-p", f"{PROMPTS[0]}\x1b[2J", "-n", "2", "--num-beams", "2") == 0
    assert capsys.readouterr().out.startswith(PROMPTS[0] + r"\x1b[2J")


@pytest.fixture(scope="module")
def chat_model(demo_dir, tmp_path_factory):
    """A template turns the shipped model into something one can talk to (it answers with a story)."""
    path = tmp_path_factory.mktemp("chat") / "chat"
    convert(demo_dir, path, "ladder:4", copy=True)
    (path / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}")
    return path


def run_here(monkeypatch, *words):
    """The entry point in this process: a start of Python costs seconds."""
    monkeypatch.setattr(sys, "argv", ["ladder", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_a_prompt_goes_into_the_chat_template_unless_it_is_raw(chat_model, monkeypatch, capsys):
    words = ("generate", chat_model, "-p", PROMPTS[0], "--max-tokens", "8", "--temperature", "0")
    assert run_here(monkeypatch, *words) == 0
    answer = capsys.readouterr()
    assert "in the model's chat template (--raw leaves it out)" in answer.err
    assert not answer.out.startswith(PROMPTS[0])
    assert run_here(monkeypatch, *words, "--raw") == 0
    continued = capsys.readouterr()
    assert "the prompt is taken as it is" in continued.err
    assert continued.out.startswith(PROMPTS[0])


def test_resume_keeps_what_is_there_and_gives_the_rest(demo_dir, tmp_path, monkeypatch, capsys):
    """Cut in the middle of a line and of a batch; sampled, so the seeds of the batches must be those of the whole."""
    (tmp_path / "prompts.txt").write_text("Once upon a time\nThe cat\nOne day\nA dog\nLily\n")
    out = tmp_path / "out.jsonl"
    words = ("generate", demo_dir, "--file", tmp_path / "prompts.txt", "--out", out, "-n", "12", "--temperature", "1")
    words += ("--seed", "3", "--batch-size", "2")
    assert run_here(monkeypatch, *words) == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:10])
    assert run_here(monkeypatch, *words, "--resume") == 0
    assert out.read_bytes() == whole
    assert "24 tokens in" in capsys.readouterr().err.splitlines()[-1]  # two prompts of five
    assert run_here(monkeypatch, *words, "--resume") == 0
    assert out.read_bytes() == whole
    assert "5 of 5 completions are in" in capsys.readouterr().err
    (tmp_path / "prompts.txt").write_text("Something else\n")
    assert run_here(monkeypatch, *words, "--resume") == 2
    assert "line 1 is of another prompt" in capsys.readouterr().err
    assert run_here(monkeypatch, *words, "--overwrite") == 0
    assert len(out.read_bytes().splitlines()) == 1


def test_a_second_writer_of_the_same_file_is_refused(demo_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts.txt").write_text("x\n")
    with Lock(tmp_path / "out.jsonl"):
        code = run_here(monkeypatch, "generate", demo_dir, "--file", tmp_path / "prompts.txt", "--out", tmp_path / "out.jsonl")
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert len(errors) == 1
    assert f"out.jsonl is in use by process {os.getpid()}" in errors[0]


def test_an_unpinned_rank_dependent_wiring_warns(demo_dir, monkeypatch, capsys):
    with pytest.warns(UserWarning, match="desync-2x computes something else on every number of ranks.*--wiring desync-2x@1"):
        assert run_here(monkeypatch, "generate", demo_dir, "-p", "x", "-n", "1", "--wiring", "desync-2x") == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert run_here(monkeypatch, "generate", demo_dir, "-p", "x", "-n", "1", "--wiring", "desync-2x@1") == 0


def test_two_ranks_chat(chat_model):
    done = run_program("chat", chat_model, "-n", "10", "--tp", "2", input=f"{PROMPTS[0]}\nThen\n")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) > 8


def generating(demo_dir, tmp_path, *options):
    """Two ranks in the middle of a long file of prompts; yields the launcher's process and the ranks' pids."""
    (tmp_path / "many.txt").write_text("Once upon a time\n" * 4000)
    words = ["generate", demo_dir, "--file", tmp_path / "many.txt", "--tp", "2", "-n", "200", "--batch-size", "2"]
    process = Program(*words, "--out", tmp_path / "out.jsonl", *options)
    deadline = time.monotonic() + 120
    while not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_text():
        assert time.monotonic() < deadline, "no output"
        assert process.poll() is None, process.stderr
        time.sleep(0.2)
    ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert len(ranks) == 2
    return process, [int(pid) for pid in ranks]


def finish(process, within, gone=()):
    started = time.monotonic()
    try:
        process.wait(within + 60)
    finally:
        process.kill()
    assert time.monotonic() - started < within
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in gone) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True, text=True).stdout.split()
    return process.stderr


# lab/test_faults.py kills a rank with SIGKILL too, and looks closer.
@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_dying_rank_stops_the_others(demo_dir, how, tmp_path):
    """One of two ranks is killed in the middle of generating: the command ends, names the rank, and leaves no process behind."""
    process, ranks = generating(demo_dir, tmp_path)
    os.kill(ranks[1], how)
    errors = finish(process, within=30)
    assert process.returncode == 1
    assert f"rank 1 of 2 (pid {ranks[1]}) on {socket.gethostname()} was killed by {how.name}" in errors, errors[-2000:]
    # What was complete before is still there, line by line.
    assert all(json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()[:-1])


def test_an_error_of_one_rank_alone_is_printed(demo_dir, tmp_path):
    """Rank 1 finds no checkpoint where rank 0 finds one (as on a second host that lacks it)."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        "is_dir = pathlib.Path.is_dir\n"
        "def only_on_rank_0(self):\n"  # asked in the rank: it may be a fork
        "    return is_dir(self) and not (os.environ.get('RANK') == '1' and str(self).endswith('assets/demo'))\n"
        "pathlib.Path.is_dir = only_on_rank_0\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = ladder("generate", demo_dir, "-p", "x", "--tp", "2", "--timeout", "20", check=False, env=environment)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "error: rank 1: " in done.stderr
    assert "Traceback" not in done.stderr


# The launcher handles SIGTERM as it does SIGINT; after SIGKILL the ranks end by themselves.
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_stopping_the_command_stops_its_ranks(demo_dir, tmp_path, how):
    process, ranks = generating(demo_dir, tmp_path)
    os.kill(process.pid, how)
    errors = finish(process, within=60, gone=ranks)
    assert process.returncode in (-how, 128 + how)
    assert "Traceback" not in errors
    if how == signal.SIGINT:
        kept = (tmp_path / "out.jsonl").read_bytes().count(b"\n")
        assert f"stopped: {kept} of 4000 completions are in {tmp_path / 'out.jsonl'}, --resume does the rest" in errors


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_after_the_time_out(demo_dir, tmp_path):
    process, ranks = generating(demo_dir, tmp_path, "--timeout", "5")
    os.kill(ranks[1], signal.SIGSTOP)
    errors = finish(process, within=60)  # the time-out, then what the launcher grants a rank that does not end by itself
    assert process.returncode == 1
    assert "rank 0 waited 5 s for rank 1 at 127.0.0.1: it is stopped, or the link is down" in errors, errors[-2000:]
