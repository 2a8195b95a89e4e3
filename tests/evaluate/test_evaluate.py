"""``ladder eval``: equal to the harness with its own Hugging Face model, in three steps as in one, on two ranks as on one."""

import gzip
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from ladder_residual.cli.main import app
from ladder_residual.distributed.world import World
from ladder_residual.evaluate import harness, results
from ladder_residual.evaluate.markdown import render
from ladder_residual.evaluate.plan import Plan
from ladder_residual.evaluate.requests import Requests, Scores
from ladder_residual.evaluate.run import Session, with_comparison
from ladder_residual.evaluate.score import score, score_all
from ladder_residual.evaluate.table import side_by_side
from ladder_residual.evaluate.tasks import wanted_tasks
from ladder_residual.generation.tokenizer import load_tokenizer
from ladder_residual.models.loading import load_model
from tests.eval_files import arc, mmlu, piqa, write_lines, write_tasks
from tests.ranks import run_on_ranks

TASKS = "arc_easy:3,piqa:0,hellaswag:2,winogrande:0,sciq:0,openbookqa:0,truthfulqa_mc1:0,wikitext:0,mmlu:5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("eval") / "tasks")


@pytest.fixture(scope="module")
def text(folder, demo_dir):
    path = folder.parent / "stories.txt"
    path.write_text((demo_dir / "stories.txt").read_text(encoding="utf-8")[:3000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tasks(folder):
    return harness.load_tasks(wanted_tasks(TASKS), [folder])


@pytest.fixture(scope="module")
def plan(text):
    return Plan(wanted_tasks(TASKS), perplexity=text, context=100, stride=40)


@pytest.fixture(scope="module")
def standard(plan, tasks, demo_dir):
    return Session(plan, World()).evaluate(str(demo_dir), tasks)


@pytest.fixture(scope="module")
def converted(plan, tasks, demo_dir):
    return Session(plan, World()).evaluate(str(demo_dir), tasks, wiring="ladder:last-half")


def figures(result):
    return {(row["task"], row["metric"]): (row["value"], row["stderr"], row["n"], row["shots"]) for row in result["rows"]}


def test_equal_to_the_harness_with_its_own_model(standard, tasks, demo_dir):
    """The twin scores one row a batch and knows nothing of ours but the checkpoint."""
    from lm_eval.models.huggingface import HFLM

    twin = HFLM(pretrained=str(demo_dir), device="cpu", dtype="float32", batch_size=1)
    twin.quiet = True
    raw = harness.run(tasks, twin, limit=None)
    rows, items = results.harness_rows(raw, tasks.wanted)
    assert items == standard["items"]
    theirs = figures({"rows": rows})
    assert theirs.keys() == figures(standard).keys()
    for key, ours in figures(standard).items():
        assert ours[0] == pytest.approx(theirs[key][0], rel=1e-5), key
        assert ours[1:] == (pytest.approx(theirs[key][1]), *theirs[key][2:]), key
    assert {"acc", "acc_norm"} <= {metric for task, metric in theirs if task == "arc_easy"}
    assert theirs["mmlu", "acc"][2:] == (6, 5)
    assert ("wikitext", "word_perplexity") in theirs
    assert 0 < theirs["piqa", "acc"][0] < 1  # some right, some wrong: the comparison means something


def test_three_steps_are_one(standard, plan, tasks, demo_dir, tmp_path):
    """Requests without a model, scores without the harness, metrics without a model: the very same figures."""
    session = Session(plan, World())
    session.requests(str(demo_dir), tasks).save(tmp_path / "requests.gz")
    requests = Requests.load(tmp_path / "requests.gz")
    assert set(requests.groups) == {"loglikelihood", "rolling", "perplexity"}
    scores = score_all(load_model(demo_dir), requests)
    Scores(scores.by_key, {"model": "elsewhere", "wiring": "standard"}).save(tmp_path / "scores.json")
    again = session.from_scores(str(demo_dir), tasks, Scores.load(tmp_path / "scores.json"))
    assert again["rows"] == standard["rows"]
    assert again["items"] == standard["items"]
    assert again["perplexity"] == standard["perplexity"]
    assert again["model"] == "elsewhere"
    assert again["machine"] == "not recorded"  # this machine made none of the scores
    fewer = Scores(dict(list(scores.by_key.items())[:-40]))
    with pytest.raises(ValueError, match="has no score"):
        session.from_scores(str(demo_dir), tasks, fewer)


def _answers(world, directory, folder, wanted):
    """Figures and all answers of this rank, scored and generated (no more than 24 tokens each)."""
    loaded = harness.load_tasks(wanted, [folder])
    loaded.harness["tasks"]["gsm8k_cot"].set_config("generation_kwargs", {"max_gen_toks": 24}, update=True)
    model = load_model(directory, world, wiring="ladder:last-half")
    options = {"model": model, "max_length": 512, "batch_size": 2, "quiet": True}
    lm = harness.ScoringLM(load_tokenizer(directory), model.config, lambda _, asked: score(model, asked), **options)
    raw = harness.run(loaded, lm, limit=3)
    texts = [sample["resps"] for sample in raw["samples"]["gsm8k_cot"]]
    return *results.harness_rows(raw, wanted), texts


def test_two_ranks_are_one(folder, demo_dir):
    wanted = wanted_tasks("gsm8k_cot:1,piqa:0")
    alone = _answers(World(), demo_dir, folder, wanted)
    first, second = run_on_ranks(2, _answers, demo_dir, folder, wanted)
    assert first == second
    assert first[1:] == alone[1:]
    assert [row | {"value": 0} for row in first[0]] == [row | {"value": 0} for row in alone[0]]
    assert [row["value"] for row in first[0]] == pytest.approx([row["value"] for row in alone[0]])
    assert all(len(text) > 5 for ((text,),) in alone[2])
    assert {row["metric"] for row in alone[0]} == {
        "exact_match (strict-match)",
        "exact_match (flexible-extract)",
        "acc",
        "acc_norm",
    }


def test_no_row_is_its_own_example(standard, tasks):
    """HellaSwag has one file here, so its examples come from the rows themselves."""
    for instance in tasks.harness["tasks"]["hellaswag"].instances:
        *examples, last = instance.args[0].split("\n\n")
        assert len(examples) == 2
        assert not any(example.startswith(last) for example in examples)
    assert {instance.args[0].count("\n\n") for instance in tasks.harness["tasks"]["arc_easy"].instances} == {3}


def test_against_itself_and_against_another(standard, converted):
    same = with_comparison(standard, standard)
    assert {pair["difference"] for pair in same["comparison"]} == {0.0}
    assert {pair["paired_stderr"] for pair in same["comparison"]} <= {0.0, None}
    assert {pair["changed"] for pair in same["comparison"]} <= {0.0, None}
    assert all(pair["within_one_stderr"] in (True, None) for pair in same["comparison"])
    assert same["perplexity_comparison"]["paired_stderr"] == 0.0
    other = with_comparison(converted, standard)
    pair = next(pair for pair in other["comparison"] if (pair["task"], pair["metric"]) == ("piqa", "acc"))
    ours, theirs = (result["items"]["piqa"]["acc"]["values"] for result in (converted, standard))
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = sum(differences) / len(differences)
    assert pair["difference"] == pytest.approx(mean)
    variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    assert pair["paired_stderr"] == pytest.approx(math.sqrt(variance / len(differences)))
    assert pair["unpaired_stderr"] == pytest.approx(math.hypot(pair["stderr"], pair["against_stderr"]))
    assert pair["within_one_stderr"] == (abs(pair["difference"]) <= pair["against_stderr"])
    assert converted["perplexity"]["nats_per_token"] > standard["perplexity"]["nats_per_token"] + 0.1  # untrained


def test_only_equal_rows_are_paired(standard):
    other = json.loads(json.dumps(standard))
    other["items"]["piqa"]["acc"]["rows"] = "different"
    other["perplexity"]["stride"] += 1
    found = with_comparison(standard, other)
    pair = next(pair for pair in found["comparison"] if (pair["task"], pair["metric"]) == ("piqa", "acc"))
    assert pair["paired_stderr"] is None
    assert pair["changed"] is None
    assert "different rows" in pair["caveat"]
    assert found["perplexity_comparison"]["paired_stderr"] is None


def test_rows_that_changed_are_counted_where_gains_and_losses_cancel():
    """Eight rows: two won, two lost, four as before."""
    one = {"task": "piqa", "metric": "acc", "shots": 0, "n": 8, "value": 0.5, "stderr": 0.2, "shown": True}
    before, after = [1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0]
    theirs, ours = ({"rows": [one], "items": {"piqa": {"acc": {"rows": "same", "values": v}}}} for v in (before, after))
    (pair,) = results.compare(ours, theirs)
    assert (pair["difference"], pair["changed"]) == (0.0, 0.5)
    made = {"model": "m", "wiring": "ladder", "date": "", "dtype": "", "tp": 1, "machine": "", "torch": "", "caveats": {}}
    page = render(ours | made | {"against": {"model": "n"}, "comparison": [pair]})
    header, _, row = (line.split(" | ") for line in page.splitlines() if line.startswith("|"))
    assert row[header.index("rows changed, %")] == "50.0"
    del pair["changed"]  # a result of an earlier version
    page = render(ours | made | {"against": {"model": "n"}, "comparison": [pair]})
    header, _, row = (line.split(" | ") for line in page.splitlines() if line.startswith("|"))
    assert row[header.index("rows changed, %")] == ""


def test_paired_error_per_token_is_the_ratio_estimators():
    ours, theirs = [(10, 20.0), (10, 22.0), (5, 11.0)], [(10, 19.0), (10, 20.5), (5, 11.0)]
    ratio = 2.5 / 25
    residuals = [1.0 - 10 * ratio, 1.5 - 10 * ratio, 0.0 - 5 * ratio]
    expected = math.sqrt(3 / 2 * sum(residual**2 for residual in residuals)) / 25
    assert results.paired_stderr_per_token(ours, theirs) == pytest.approx(expected)
    assert results.paired_stderr_per_token(ours[:1], theirs[:1]) is None
    assert results.paired_stderr([1.0], [0.0]) is None


def test_side_by_side(standard, converted):
    page = side_by_side({"before": standard, "zero-shot": converted, "again": standard}, metric="acc")
    lines = page.splitlines()
    assert lines[0] == "| task | shots | rows | before | zero-shot | again |"
    assert any(line.startswith("| arc_easy, acc | 3 | 6 |") for line in lines)
    assert any(line.startswith("| wikitext, word_perplexity | 0 | 2 |") for line in lines)
    assert any(line.startswith("| average |") for line in lines)
    cells = next(line for line in lines if line.startswith("| piqa, acc |")).split(" | ")
    assert cells[3].endswith("± 22.4")
    assert cells[5] == "**50.0 (+0.0 ± 0.0)** |"  # the same model again: no difference, within one error
    assert "| arc_easy, acc_norm |" in side_by_side({"a": standard, "b": converted})
    with pytest.raises(ValueError, match="at least two"):
        side_by_side({"a": standard})
    with pytest.raises(ValueError, match="no task in common"):
        side_by_side(
            {"a": standard, "b": {**standard, "rows": [], "perplexity": None} | {"perplexity": None}} | {"c": {"rows": []}}
        )


def ladder(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_the_command_writes_json_and_markdown(folder, demo_dir, text, tmp_path):
    out = tmp_path / "r.json"
    done = ladder(
        demo_dir,
        "--tasks",
        "piqa,arc_easy:0",
        "--local",
        folder,
        "--limit",
        4,
        "--perplexity",
        text,
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
        folder,
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
    done = ladder(demo_dir, "--tasks", "piqa", "--local", folder, "--limit", 4, "--against", demo_dir)
    assert "| piqa | 0 | 4 | acc_norm |" in done.stdout
    assert "| +0.0 | 0.0 |" in done.stdout
    assert done.stdout.count("| yes |") == 1


def test_the_command_in_three_steps(folder, demo_dir, tmp_path):
    options = ["--tasks", "piqa,sciq:0", "--local", folder]
    done = ladder(demo_dir, *options, "--requests-out", tmp_path / "r.gz")
    assert "24 loglikelihood" not in done.stdout
    assert "36 requests (36 loglikelihood)" in done.stdout, done.exception
    requests = Requests.load(tmp_path / "r.gz")
    score_all(load_model(demo_dir), requests).save(tmp_path / "s.json")
    done = ladder(demo_dir, *options, "--scores-in", tmp_path / "s.json", "--json")
    direct = ladder(demo_dir, *options, "--json")
    assert json.loads(done.stdout)["rows"] == json.loads(direct.stdout)["rows"]


def test_scores_of_several_models_in_one_file(folder, demo_dir, tmp_path):
    """As a run over many models on another machine gathers them: a result for each, and the table of all."""
    options = ["--tasks", "piqa,arc_easy:2", "--local", folder]
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
def test_what_cannot_be_done_is_said(arguments, message, folder, demo_dir, text, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    arguments = [{"TEXT": text, "EMPTY": tmp_path / "empty.txt"}.get(word, word) for word in arguments]
    if "humaneval" in arguments:
        row = {"task_id": "1", "prompt": "p", "canonical_solution": "c", "test": "t", "entry_point": "e"}
        write_lines(tmp_path / "humaneval.jsonl", [row])
        arguments += ["--local", tmp_path]
    done = ladder(demo_dir, *arguments, "--local", folder)
    assert isinstance(done.exception, ValueError), done.exception
    assert message in str(done.exception)


def test_windows_are_no_longer_than_the_models_context(demo_dir, text):
    with pytest.warns(UserWarning, match="the model's context is 512 tokens: windows hold 512, not 4096"):
        found = Session(Plan(perplexity=text, context=4096, stride=4096), World()).evaluate(str(demo_dir), None)["perplexity"]
    assert (found["context"], found["stride"]) == (512, 512)


def test_a_damaged_row_is_named(folder, demo_dir, tmp_path):
    write_lines(tmp_path / "piqa_val.jsonl", [piqa(1), piqa(2), {"goal": "x"}])
    done = ladder(demo_dir, "--tasks", "piqa", "--local", tmp_path)
    assert "piqa_val.jsonl, line 3: not a row of piqa: it has no sol1" in str(done.exception)


def test_a_model_without_tokenizer(folder, demo_dir, tmp_path):
    shutil.copytree(demo_dir, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    done = ladder(tmp_path / "model", "--tasks", "piqa", "--local", folder)
    assert isinstance(done.exception, ValueError)
    assert "has no tokenizer" in str(done.exception)


def test_a_subject_mmlu_does_not_have(demo_dir, tmp_path):
    row = {"question": "?", "subject": "witchcraft", "choices": ["a", "b", "c", "d"], "answer": 1}
    write_lines(tmp_path / "mmlu_test.jsonl", [row])
    done = ladder(demo_dir, "--tasks", "mmlu:0", "--local", tmp_path)
    assert "unknown MMLU subject 'witchcraft'" in str(done.exception)


def test_judges_that_are_not_installed(folder, demo_dir, tmp_path, monkeypatch):
    """Asked for by name it is an error that says what to install; in a set the rest runs and the page says what was left out."""
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ifeval")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "langdetect", None)
    write_lines(tmp_path / "ifeval.jsonl", [{"key": 1, "prompt": "Say.", "instruction_id_list": ["a:b"], "kwargs": [{}]}])
    done = ladder(demo_dir, "--tasks", "ifeval", "--local", tmp_path)
    assert isinstance(done.exception, ValueError), done.exception
    assert "pip install 'lm-eval[ifeval]'" in str(done.exception)
    shutil.copy(folder / "openbookqa_test.jsonl", tmp_path)
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


def test_contexts_that_do_not_fit_are_cut_and_counted(tasks, demo_dir):
    plan = Plan(wanted_tasks(TASKS), max_length=60, limit=2)
    result = Session(plan, World()).evaluate(str(demo_dir), tasks)
    (caveat,) = result["caveats"]["all tasks"]
    assert "longer than 60 tokens" in caveat
    with pytest.raises(ValueError, match="an answer has"):
        Session(Plan(wanted_tasks(TASKS), max_length=3), World()).evaluate(str(demo_dir), tasks)


@pytest.mark.slow
def test_an_unknown_task_of_the_hub(demo_dir):
    done = ladder(demo_dir, "--tasks", "arc_eazy")
    assert "unknown task 'arc_eazy' (did you mean 'arc_easy'" in str(done.exception)
    done = ladder(demo_dir, "--tasks", "blimp_adjunct_ilands")
    assert "blimp_adjunct_island" in str(done.exception)


@pytest.mark.slow
def test_the_command_where_heads_do_not_divide(demo_dir, text, tmp_path):
    """Four KV heads on three ranks: refused with the flag that allows it, which gives the figures of one rank."""
    found = []
    for ranks in ([], ["--tp", "3"], ["--tp", "3", "--uneven"]):
        out = tmp_path / f"{len(found)}.json"
        command = [sys.executable, "-m", "ladder_residual", "eval", demo_dir, "--perplexity", text, "--context", "128"]
        command += ["--stride", "64", "--against", demo_dir, "--out", out, *ranks]
        found.append((subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300), out))
    (alone, one), (refused, _), (allowed, three) = found
    assert refused.returncode != 0
    assert "--uneven" in refused.stderr
    assert alone.returncode == allowed.returncode == 0, allowed.stderr[-3000:]
    assert results.load(three)["tp"] == 3
    assert results.load(three)["perplexity"]["ppl"] == pytest.approx(results.load(one)["perplexity"]["ppl"], rel=1e-4)


@pytest.mark.slow
def test_the_command_on_two_ranks(folder, demo_dir, tmp_path):
    """As users start it, by --tp and by torchrun."""
    alone, launched, torchrun = tmp_path / "1.json", tmp_path / "2.json", tmp_path / "3.json"
    options = ["eval", demo_dir, "--tasks", "piqa,gsm8k_cot:0,mmlu:2", "--limit", "2", "--files", folder, "--out"]
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
