"""Text generation and the command line, on the shipped model."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from ladder_residual.bench.commands import read_seconds, split_wirings
from ladder_residual.cli import app, main
from ladder_residual.generate import Sampling, complete, complete_all, load_tokenizer, read_prompts
from ladder_residual.loading import load_model
from ladder_residual.parallel import World

PROMPT = "Once upon a time, there was a little girl"
STORY = " named Lily. She loved to play outside in the park. One day, she saw a big, red ball."


def ladder(*arguments, check=True, timeout=240, **options):
    done = subprocess.run(
        [sys.executable, "-m", "ladder_residual", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def model(demo_dir):
    return load_model(demo_dir), load_tokenizer(demo_dir)


def test_the_shipped_model_tells_its_story(model):
    text = complete(*model, [PROMPT], Sampling(max_new_tokens=60, temperature=0), World())[0].text
    assert text.startswith(STORY)


def test_batches_equal_single_prompts(model):
    prompts = [PROMPT, "The dog", "One day, Tom and Sue went to"]
    greedy = Sampling(max_new_tokens=20, temperature=0)
    together = [c.text for c in complete(*model, prompts, greedy, World())]
    assert together == [complete(*model, [prompt], greedy, World())[0].text for prompt in prompts]


def test_sampling_options(model):
    def text(**options):
        return complete(*model, [PROMPT], Sampling(max_new_tokens=25, **options), World())[0].text

    assert text(temperature=1.0, seed=1) == text(temperature=1.0, seed=1)
    assert text(temperature=1.0, seed=1) != text(temperature=1.0, seed=2)
    assert text(temperature=1.0, top_k=1, seed=3) == text(temperature=0)
    assert text(top_p=0.9, min_p=0.05, seed=4)
    assert text(repetition_penalty=1.5, temperature=0) != text(temperature=0)
    assert text(temperature=0, stop=("park",)).endswith("park")
    assert text(num_beams=3, temperature=0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1}, "temperature must be between"),
        ({"top_p": 1.5}, "top-p must be between 0 and 1, got 1.5"),
        ({"max_new_tokens": 0}, "max-new-tokens"),
        ({"stop": ("",)}, "stop string is empty"),
    ],
)
def test_bad_sampling(options, named):
    with pytest.raises(ValueError, match=named):
        Sampling(**options)


def test_one_seed_draws_anew_in_every_batch(model):
    sampling = Sampling(max_new_tokens=15, temperature=1.5, seed=7)
    options = dict(batch_size=2, chat=False)
    texts = [c.text for c in complete_all(*model, [PROMPT] * 4, sampling, World(), **options)]
    assert len(set(texts)) == 4
    assert texts == [c.text for c in complete_all(*model, [PROMPT] * 4, sampling, World(), **options)]


def test_tokens_after_a_stop_string_do_not_count(model):
    sampling = Sampling(max_new_tokens=40, temperature=0, stop=("Lily",))
    stopped, other = complete(*model, [PROMPT, "The dog and the cat"], sampling, World())
    assert stopped.text == " named Lily"
    assert stopped.new_tokens < 10 < other.new_tokens


def test_prompts_that_do_not_fit(model):
    with pytest.raises(ValueError, match="exceed the model's context of 512"):
        complete(*model, ["word " * 600], Sampling(max_new_tokens=10), World())


def test_prompt_files(model, tmp_path):
    tokenizer = model[1]
    good = tmp_path / "prompts.jsonl"
    good.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert read_prompts(good, tokenizer) == (["a", "b"], False)
    good.write_text('{"prompt": "a\u2028b"}\n')
    assert read_prompts(good, tokenizer) == (["a\u2028b"], False)
    for content, named in [
        ("{\n", "line 1: not JSON"),
        ('{"prompt": "a"}\n{"text": "b"}\n', 'line 2: expected an object with "prompt"'),
        ("[1]\n", "line 1: expected"),
        ("", "holds no prompt"),
        ('{"messages": []}\n', "no chat template"),
        ('{"messages": ["x"]}\n', "line 1: every message needs"),
    ]:
        bad = tmp_path / "bad.jsonl"
        bad.write_text(content)
        with pytest.raises(ValueError, match=named):
            read_prompts(bad, tokenizer)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_prompts(tmp_path / "binary.txt", tokenizer)


def test_command_line_on_one_and_two_ranks(demo_dir, tmp_path):
    """Convert, generate on one process and on two: the same text; a file of prompts to JSONL."""
    ladder("convert", demo_dir, tmp_path / "half", "--wiring", "ladder:last-half")
    arguments = ("generate", tmp_path / "half", "--prompt", PROMPT, "-n", "30", "--temperature", "0")
    one, two = ladder(*arguments), ladder(*arguments, "--tp", "2")
    assert one.stdout == two.stdout
    assert one.stdout.startswith(PROMPT)
    assert "tokens/s" in two.stderr
    assert "[ladder:3-4, 2 ranks, cpu]" in two.stderr
    sampled = [
        ladder(*arguments[:4], "-n", "20", "--temperature", "1", "--seed", "7", *ranks).stdout for ranks in ((), ("--tp", "4"))
    ]
    assert sampled[0] == sampled[1]
    (tmp_path / "prompts.txt").write_text("The cat\nOnce upon a time\n")
    ladder(
        "generate",
        tmp_path / "half",
        "--file",
        tmp_path / "prompts.txt",
        "--out",
        tmp_path / "out.jsonl",
        "--tp",
        "2",
        "-n",
        "8",
    )
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["The cat", "Once upon a time"]
    assert all(row["new_tokens"] >= 1 for row in rows)


def test_torchrun_is_the_same_as_tp(demo_dir):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        + ["-m", "ladder_residual", "generate", str(demo_dir), "--wiring", "ladder", "--prompt", PROMPT, "-n", "12"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one = ladder("generate", demo_dir, "--wiring", "ladder", "--prompt", PROMPT, "-n", "12")
    assert one.stdout.strip() in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "DEMO"], "give either --prompt TEXT or --file FILE"),
        (["generate", "DEMO", "-p", "x", "--out", "OUT"], "--out takes the completions of --file"),
        (["generate", "DEMO", "--file", "OUT", "--out", "OUT"], "the same file"),
        (["generate", "DEMO", "-p", "\udcff"], "not valid text"),
        (["generate", "DEMO", "-p", "x", "--seed", "99999999999999999999"], "seed must be between"),
        (["convert", "DEMO", "/proc/x", "--wiring", "ladder"], "/proc/"),
        (["generate", "DEMO", "-p", "x", "--tp", "0"], "--tp must be at least 1"),
        (["generate", "DEMO", "-p", "x", "--wiring", "ladder:9"], "layer 9, but the model has 5 layers"),
        (["bench", "decode", "--model", "DEMO", "--tp", "2", "--prompt", "-5", "--new", "2"], "--context must be at least 1"),
        (["bench", "prefill", "--model", "DEMO", "--tp", "2", "--prompt", "0"], "--prompt must be at least 1, got 0"),
        (["bench", "e2e", "--model", "DEMO", "--tp", "2", "--new", "0"], "--new must be at least 1, got 0"),
        (["bench", "decode", "--model", "DEMO", "--tp", "1"], "use --tp 2 or more"),
        (["bench", "decode", "--model", "DEMO", "--tp", "2", "--products", "triton"], "are the CUDA engine's"),
        (["generate", "DEMO", "-p", "x", "--device", "tpu"], "unknown device"),
        (["generate", "DEMO", "-p", "x", "--dtype", "int3"], "unknown dtype"),
        (["generate", "/nothing/there", "-p", "x"], "no checkpoint directory"),
        (["chat", "DEMO"], "no chat template"),
        (["convert", "DEMO", "OUT", "--wiring", "laddr"], "did you mean 'ladder'"),
        (["bench", "overlap", "--latency", "5"], "no unit"),
        (["bench", "overlap", "--model", "llama-9"], "unknown preset"),
        (["bench", "decode", "--batch", "1,x", "--device", "cpu"], "--batch takes whole numbers"),
        (["bench", "prefill", "--device", "cuda"], "torch sees no CUDA device"),
        (["bench", "e2e", "--batch", "1,x"], "--batch takes whole numbers"),
        (["bench", "prefill", "--links", "h200-nccl", "--device", "cpu", "--tp", "1"], "need a GPU"),
        (["generate", "DEMO", "-p", "x", "--schedule", "three"], "unknown schedule 'three'"),
        (["generate", "DEMO", "-p", "x", "--emulate", "tp=8"], "cannot emulate 'tp=8'"),
        (["generate", "DEMO", "-p", "x", "--emulate", "tp=2,link=24us", "--tp", "2"], "leave out --tp 2"),
        (["generate", "DEMO", "-p", "x", "--emulate", "tp=2,link=24us"], "needs the CUDA engine and a GPU"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(arguments, named, demo_dir, tmp_path, monkeypatch, capfd):
    words = [str(demo_dir) if word == "DEMO" else str(tmp_path / "x") if word == "OUT" else word for word in arguments]
    monkeypatch.setattr(sys, "argv", ["ladder", *words])  # the entry point in this process: a start of Python costs seconds
    with pytest.raises(SystemExit) as ended:
        main()
    check_mistake(ended.value.code, capfd.readouterr().err, named)


def test_a_mistake_ends_the_command(demo_dir):
    done = ladder("generate", demo_dir, "-p", "x", "--tp", "3", check=False)
    check_mistake(done.returncode, done.stderr, "tp=3 does not divide 8 query heads with 4 KV heads")


def check_mistake(code, told, named):
    assert code == 2, told[-2000:]
    errors = [line for line in told.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, told[-2000:]
    assert named in errors[0]
    assert "Traceback" not in told


def test_chat(demo_dir, tmp_path):
    """A template turns the shipped model into something one can talk to (it answers with a story)."""
    ladder("convert", demo_dir, tmp_path / "chat", "--wiring", "ladder:4", "--copy")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }} {% endfor %}")
    for ranks in ((), ("--tp", "2")):
        done = ladder("chat", tmp_path / "chat", "-n", "10", *ranks, input=f"{PROMPT}\nThen\n")
        assert len(done.stdout.split()) > 8


def test_inspect_prints_and_tells_programs(demo_dir):
    assert "llama" in ladder("inspect", demo_dir).stdout
    found = json.loads(ladder("inspect", demo_dir, "--json").stdout)
    assert found["layers"] == 5


def test_bench_decode_on_cpu_measures_real_ranks(demo_dir):
    done = ladder(
        *("bench", "decode", "--model", demo_dir, "--tp", "2", "--batch", "1,3", "--context", "8"),
        *("--links", "none,200us", "--wirings", "ladder,desync-2x", "--repeats", "5"),
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert {(row["batch"], row["wiring"]) for row in result["rows"]} == {
        (batch, wiring) for batch in (1, 3) for wiring in ("standard", "ladder", "desync-2x", "no-comm")
    }
    assert all(row["median_ms"] > 0 for row in result["rows"])


@pytest.mark.parametrize("phase", ["prefill", "e2e"])
def test_the_other_phases_on_cpu_measure_real_ranks(phase, demo_dir):
    words = ["bench", phase, "--model", demo_dir, "--tp", "2", "--batch", "1,2", "--prompt", "8", "--links", "none"]
    done = ladder(*words, "--wirings", "ladder", "--repeats", "5", "--json", *(["--new", "4"] if phase == "e2e" else []))
    result = json.loads(done.stdout)  # nothing but the JSON
    assert result["benchmark"] == phase
    assert result["sums_per_step"] == 2 * 5 * (4 if phase == "e2e" else 1)
    assert {(row["batch"], row["wiring"]) for row in result["rows"]} == {
        (batch, wiring) for batch in (1, 2) for wiring in ("standard", "ladder", "no-comm")
    }
    counted = 4 if phase == "e2e" else 8
    assert all(row["tokens_per_s"] == pytest.approx(row["batch"] * counted * 1e3 / row["median_ms"]) for row in result["rows"])


def test_the_demo_shows_what_it_says():
    result = json.loads(ladder("demo", "--json").stdout)
    assert result["same_text"]
    assert {row["wiring"] for row in result["overlap"]["rows"]} == {"standard", "ladder:last-half", "ladder", "no-comm"}
    losses = result["losses"]
    assert 1.2 < losses["standard"] < 1.4  # the loss of a model that knows the language of these stories
    assert losses["standard"] < losses["ladder:last-half"] < losses["ladder"]


def test_small_readers():
    assert read_seconds("500us") == pytest.approx(5e-4)
    assert read_seconds("2ms") == pytest.approx(2e-3)
    assert read_seconds("auto") is None
    assert split_wirings("standard,ladder:0,2-3,desync-2x") == ["standard", "ladder:0,2-3", "desync-2x"]
    assert CliRunner().invoke(app, ["--version"]).output.startswith("ladder-residual ")


def generating(demo_dir, tmp_path, *options):
    """Two ranks in the middle of a long file of prompts; yields the launcher's process and the ranks' pids."""
    (tmp_path / "many.txt").write_text("Once upon a time\n" * 4000)
    process = subprocess.Popen(
        [sys.executable, "-m", "ladder_residual", "generate", str(demo_dir), "--file", str(tmp_path / "many.txt"), "--tp", "2"]
        + ["-n", "200", "--batch-size", "2", "--out", str(tmp_path / "out.jsonl"), *options],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_text():
        assert time.monotonic() < deadline, "no output"
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.2)
    ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert len(ranks) == 2
    return process, [int(pid) for pid in ranks]


def finish(process, within, gone=()):
    started = time.monotonic()
    try:
        _, errors = process.communicate(timeout=within + 60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert time.monotonic() - started < within
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in gone) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True, text=True).stdout.split()
    return errors


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_dying_rank_stops_the_others(demo_dir, how, tmp_path):
    """One of two ranks is killed in the middle of generating: the command ends, names the rank, and leaves no process behind."""
    process, ranks = generating(demo_dir, tmp_path)
    os.kill(ranks[1], how)
    errors = finish(process, within=30)
    assert process.returncode == 1
    assert f"rank 1 of 2 (pid {ranks[1]}) on {socket.gethostname()} was killed by {how.name}" in errors, errors[-2000:]
    # What was complete before is still there, line by line.
    assert all(json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()[:-1])


def test_an_error_of_one_rank_alone_is_told(demo_dir, tmp_path):
    """Rank 1 finds no checkpoint where rank 0 finds one (as on a second host that lacks it)."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        "if os.environ.get('RANK') == '1':\n"
        "    is_dir = pathlib.Path.is_dir\n"
        "    pathlib.Path.is_dir = lambda self: False if str(self).endswith('data/demo') else is_dir(self)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = ladder("generate", demo_dir, "-p", "x", "--tp", "2", "--timeout", "20", check=False, env=environment)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "error: rank 1: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopping_the_command_stops_its_ranks(demo_dir, tmp_path, how):
    process, ranks = generating(demo_dir, tmp_path)
    os.kill(process.pid, how)
    errors = finish(process, within=60, gone=ranks)
    assert process.returncode in (-how, 128 + how)
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_after_the_time_out(demo_dir, tmp_path):
    process, ranks = generating(demo_dir, tmp_path, "--timeout", "5")
    os.kill(ranks[1], signal.SIGSTOP)
    errors = finish(process, within=60)  # the time-out, then what the launcher grants a rank that does not end by itself
    assert process.returncode == 1
    assert "rank 0 waited 5 s for rank 1 at 127.0.0.1: it is stopped, or the link is down" in errors, errors[-2000:]
