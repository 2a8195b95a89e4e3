"""``ladder eval``: what it writes and what it refuses, on one rank and on two."""

import gzip
import json
import shutil
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from ladder_residual.cli.main import app
from ladder_residual.evaluate import results
from ladder_residual.evaluate.requests import Requests
from ladder_residual.evaluate.score import score_all
from ladder_residual.evaluate.table import side_by_side
from ladder_residual.models.loading import load_model
from tests.eval_files import arc, figures, mmlu, piqa, write_lines


def ladder(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_the_command_writes_json_and_markdown(task_folder, demo_dir, story_text, tmp_path):
    out = tmp_path / "r.json"
    done = ladder(
        demo_dir,
        "--tasks",
        "piqa,arc_easy:0",
        "--local",
        task_folder,
        "--limit",
        4,
        "--perplexity",
        story_text,
        "--context",
        64,
        "--stride",
        64,
        "--out",
        out,
    )
    assert done.exit_code == 0, done.exception
    assert "| piqa | 0 | 4 | acc_norm |" in done.stdout
    assert done.stdout == out.with_suffix(".md").read_text()
    assert "- piqa: 6 of the 1838 rows" in done.stdout
    stored = results.load(out)
    assert {"commit", "date", "machine", "torch", "lm_eval", "wiring", "dtype", "tp"} <= stored.keys()
    done = ladder(
        demo_dir,
        "--tasks",
        "piqa,arc_easy:0",
        "--local",
        task_folder,
        "--limit",
        4,
        "--wiring",
        "ladder",
        "--against",
        out,
        "--json",
    )
    assert done.exit_code == 0, done.exception
    document = json.loads(done.stdout)
    assert document["against"]["model"] == str(demo_dir)
    assert len(document["comparison"]) == 4
    done = ladder(demo_dir, "--tasks", "piqa", "--local", task_folder, "--limit", 4, "--against", demo_dir)
    assert "| piqa | 0 | 4 | acc_norm |" in done.stdout
    assert "| +0.0 | 0.0 |" in done.stdout
    assert done.stdout.count("| yes |") == 1


def test_the_command_in_three_steps(task_folder, demo_dir, tmp_path):
    options = ["--tasks", "piqa,sciq:0", "--local", task_folder]
    done = ladder(demo_dir, *options, "--requests-out", tmp_path / "r.gz")
    assert "24 loglikelihood" not in done.stdout
    assert "36 requests (36 loglikelihood)" in done.stdout, done.exception
    requests = Requests.load(tmp_path / "r.gz")
    score_all(load_model(demo_dir), requests).save(tmp_path / "s.json")
    done = ladder(demo_dir, *options, "--scores-in", tmp_path / "s.json", "--json")
    direct = ladder(demo_dir, *options, "--json")
    assert json.loads(done.stdout)["rows"] == json.loads(direct.stdout)["rows"]


def test_scores_of_several_models_in_one_file(task_folder, demo_dir, tmp_path):
    """As a run over many models on another machine gathers them: a result for each, and the table of all."""
    options = ["--tasks", "piqa,arc_easy:2", "--local", task_folder]
    ladder(demo_dir, *options, "--requests-out", tmp_path / "r.gz")
    gathered = {}
    for name, wiring in (("before", "standard"), ("zero-shot, last half", "ladder:last-half")):
        score_all(load_model(demo_dir, wiring=wiring), Requests.load(tmp_path / "r.gz")).save(tmp_path / "s.json")
        gathered[name] = json.loads((tmp_path / "s.json").read_text())
    with gzip.open(tmp_path / "all.json.gz", "wt") as file:
        json.dump(gathered, file)
    done = ladder(demo_dir, *options, "--scores-in", tmp_path / "all.json.gz", "--out", tmp_path / "all.json")
    assert done.exit_code == 0, done.exception
    assert done.stdout.startswith("| task | shots | rows | before | zero-shot, last half |")
    assert (tmp_path / "all.md").read_text() == done.stdout
    stored = {name: results.load(tmp_path / f"all-{name}.json") for name in ("before", "zero-shot-last-half")}
    assert [result["wiring"] for result in stored.values()] == ["standard", "ladder:3-4"]
    assert all(result["torch"] == torch.__version__ for result in stored.values())
    direct = ladder(demo_dir, *options, "--wiring", "ladder:last-half", "--json")
    assert json.loads(direct.stdout)["rows"] == stored["zero-shot-last-half"]["rows"]
    again = side_by_side({"before": stored["before"], "zero-shot, last half": stored["zero-shot-last-half"]})
    assert again == done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to do"),
        (["--tasks", "arc_challenge"], "no file for task arc_challenge"),
        (["--tasks", "piqqa"], "did you mean 'piqa'"),
        (["--tasks", "piqa", "--shots", "x"], "got 'x'"),
        (["--tasks", "piqa", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--tasks", "piqa", "--tp", "0"], "tp must be at least 1"),
        (["--tasks", "piqa", "--out", "r.txt"], "ends in .json"),
        (["--tasks", "piqa", "--requests-out", "a", "--scores-in", "b"], "drop --scores-in"),
        (["--tasks", "piqa", "--requests-out", "a", "--tp", "2"], "drop --tp"),
        (["--tasks", "gsm8k_cot", "--requests-out", "a.gz"], "gsm8k_cot: text must be generated with the model"),
        (["--tasks", "piqa", "--scores-in", "none.json"], "cannot read the scores"),
        (["--tasks", "piqa", "--against", "nowhere/at/all"], "no checkpoint directory"),
        (["--tasks", "humaneval"], "allow that with --allow-code"),
        (["--perplexity", "none.txt"], "cannot read none.txt"),
        (["--perplexity", "EMPTY"], "holds no text"),
        (["--perplexity", "TEXT", "--context", "1"], "at least 2 tokens, got a context of 1"),
        (["--perplexity", "TEXT", "--stride", "0"], "stride must be between 1 and"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(arguments, message, task_folder, demo_dir, story_text, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    arguments = [{"TEXT": story_text, "EMPTY": tmp_path / "empty.txt"}.get(word, word) for word in arguments]
    if "humaneval" in arguments:
        row = {"task_id": "1", "prompt": "p", "canonical_solution": "c", "test": "t", "entry_point": "e"}
        write_lines(tmp_path / "humaneval.jsonl", [row])
        arguments += ["--local", tmp_path]
    done = ladder(demo_dir, *arguments, "--local", task_folder)
    assert isinstance(done.exception, ValueError), done.exception
    assert message in str(done.exception)


def test_a_damaged_row_is_named(task_folder, demo_dir, tmp_path):
    write_lines(tmp_path / "piqa_val.jsonl", [piqa(1), piqa(2), {"goal": "x"}])
    done = ladder(demo_dir, "--tasks", "piqa", "--local", tmp_path)
    assert "piqa_val.jsonl, line 3: not a row of piqa: it has no sol1" in str(done.exception)


def test_a_model_without_tokenizer(task_folder, demo_dir, tmp_path):
    shutil.copytree(demo_dir, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    done = ladder(tmp_path / "model", "--tasks", "piqa", "--local", task_folder)
    assert isinstance(done.exception, ValueError)
    assert "has no tokenizer" in str(done.exception)


def test_a_subject_mmlu_does_not_have(demo_dir, tmp_path):
    row = {"question": "?", "subject": "witchcraft", "choices": ["a", "b", "c", "d"], "answer": 1}
    write_lines(tmp_path / "mmlu_test.jsonl", [row])
    done = ladder(demo_dir, "--tasks", "mmlu:0", "--local", tmp_path)
    assert "unknown MMLU subject 'witchcraft'" in str(done.exception)


def test_judges_that_are_not_installed(task_folder, demo_dir, tmp_path, monkeypatch):
    """Asked for by name it is an error that says what to install; in a set the rest runs and the page says what was left out."""
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ifeval")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "langdetect", None)
    write_lines(tmp_path / "ifeval.jsonl", [{"key": 1, "prompt": "Say.", "instruction_id_list": ["a:b"], "kwargs": [{}]}])
    done = ladder(demo_dir, "--tasks", "ifeval", "--local", tmp_path)
    assert isinstance(done.exception, ValueError), done.exception
    assert "pip install 'lm-eval[ifeval]'" in str(done.exception)
    shutil.copy(task_folder / "openbookqa_test.jsonl", tmp_path)
    done = ladder(demo_dir, "--tasks", "paper-adapt", "--limit", 2, "--local", tmp_path)
    assert done.exit_code == 0, done.exception
    assert "- ifeval: left out: ifeval cannot be judged here" in done.stdout
    assert "- humaneval_plus: left out: humaneval_plus runs the code" in done.stdout
    assert "- arc_challenge: left out: no file for task" in done.stdout
    assert "| openbookqa | 0 | 2 | acc_norm |" in done.stdout


def test_tasks_of_the_hub(demo_dir, monkeypatch):
    """The way users with a connection go, up to the download: the harness's own splits, groups of groups, tags."""
    import datasets

    asked = []

    def load_dataset(path, name=None, **_):
        asked.append((path, name))
        if path == "baber/piqa":
            rows = {"train": map(piqa, range(20, 30)), "validation": map(piqa, range(6))}
        elif path == "cais/mmlu":
            rows = {"test": [mmlu(len(name), name), mmlu(1, name)], "dev": [mmlu(i, name) for i in range(5)]}
        else:
            rows = {"train": map(arc, range(20, 30)), "validation": map(arc, range(40, 44)), "test": map(arc, range(4))}
        return {split: datasets.Dataset.from_list(list(found)) for split, found in rows.items()}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    done = ladder(demo_dir, "--tasks", "piqa:2,mmlu:0,arc_easy", "--limit", 1, "--json")
    assert done.exit_code == 0, done.exception
    assert ("allenai/ai2_arc", "ARC-Easy") in asked
    found = figures(json.loads(done.stdout))
    assert found["mmlu", "acc"][2:] == (57, 0)
    assert found["piqa", "acc_norm"][2:] == (1, 2)
    assert {task for task, _ in found} == {"piqa", "mmlu", "arc_easy"}
    assert json.loads(done.stdout)["caveats"] == {}


def test_without_files_the_hub_is_asked(demo_dir):
    done = ladder(demo_dir, "--tasks", "piqa")  # tests run without the network
    assert isinstance(done.exception, ValueError)
    assert "cannot load piqa" in str(done.exception)
    assert "--local FOLDER" in str(done.exception)


@pytest.mark.slow
def test_an_unknown_task_of_the_hub(demo_dir):
    done = ladder(demo_dir, "--tasks", "arc_eazy")
    assert "unknown task 'arc_eazy' (did you mean 'arc_easy'" in str(done.exception)
    done = ladder(demo_dir, "--tasks", "blimp_adjunct_ilands")
    assert "blimp_adjunct_island" in str(done.exception)


@pytest.mark.slow
def test_the_command_where_heads_do_not_divide(demo_dir, story_text, tmp_path):
    """Four KV heads on three ranks: refused with the flag that allows it, which gives the figures of one rank."""
    found = []
    for ranks in ([], ["--tp", "3"], ["--tp", "3", "--uneven"]):
        out = tmp_path / f"{len(found)}.json"
        command = [sys.executable, "-m", "ladder_residual", "eval", demo_dir, "--perplexity", story_text, "--context", "128"]
        command += ["--stride", "64", "--against", demo_dir, "--out", out, *ranks]
        found.append((subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300), out))
    (alone, one), (refused, _), (allowed, three) = found
    assert refused.returncode != 0
    assert "--uneven" in refused.stderr
    assert alone.returncode == allowed.returncode == 0, allowed.stderr[-3000:]
    assert results.load(three)["tp"] == 3
    assert results.load(three)["perplexity"]["ppl"] == pytest.approx(results.load(one)["perplexity"]["ppl"], rel=1e-4)


@pytest.mark.slow
def test_the_command_on_two_ranks(task_folder, demo_dir, tmp_path):
    """As users start it, by --tp and by torchrun."""
    alone, launched, torchrun = tmp_path / "1.json", tmp_path / "2.json", tmp_path / "3.json"
    options = ["eval", demo_dir, "--tasks", "piqa,gsm8k_cot:0,mmlu:2", "--limit", "2", "--files", task_folder, "--out"]
    for command in (
        [sys.executable, "-m", "ladder_residual", *options, alone],
        [sys.executable, "-m", "ladder_residual", *options, launched, "--tp", "2"],
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ladder_residual", *options, torchrun],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("| piqa |") == 1
    one, two, three = (results.load(path) for path in (alone, launched, torchrun))
    assert (one["tp"], two["tp"], three["tp"]) == (1, 2, 2)
    assert one["items"] == two["items"] == three["items"]
    for ours, theirs in zip(figures(one).values(), figures(two).values(), strict=True):
        assert ours[0] == pytest.approx(theirs[0])
