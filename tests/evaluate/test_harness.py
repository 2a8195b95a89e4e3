"""Figures equal those of the harness with its own Hugging Face model, and are the same on two ranks as on one."""

import pytest

from ladder_residual.distributed.world import World
from ladder_residual.evaluate import harness, results
from ladder_residual.evaluate.plan import Plan
from ladder_residual.evaluate.run import Session
from ladder_residual.evaluate.score import score
from ladder_residual.evaluate.tasks import wanted_tasks
from ladder_residual.generation.tokenizer import load_tokenizer
from ladder_residual.models.loading import load_model
from tests.eval_files import TASKS, figures
from tests.ranks import run_on_ranks


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


def _answers(world, directory, task_folder, wanted):
    """Figures and all answers of this rank, scored and generated (no more than 24 tokens each)."""
    loaded = harness.load_tasks(wanted, [task_folder])
    loaded.harness["tasks"]["gsm8k_cot"].set_config("generation_kwargs", {"max_gen_toks": 24}, update=True)
    model = load_model(directory, world, wiring="ladder:last-half")
    options = {"model": model, "max_length": 512, "batch_size": 2, "quiet": True}
    lm = harness.ScoringLM(load_tokenizer(directory), model.config, lambda _, asked: score(model, asked), **options)
    raw = harness.run(loaded, lm, limit=3)
    texts = [sample["resps"] for sample in raw["samples"]["gsm8k_cot"]]
    return *results.harness_rows(raw, wanted), texts


def test_two_ranks_are_one(task_folder, demo_dir):
    wanted = wanted_tasks("gsm8k_cot:1,piqa:0")
    alone = _answers(World(), demo_dir, task_folder, wanted)
    first, second = run_on_ranks(2, _answers, demo_dir, task_folder, wanted)
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


def test_contexts_that_do_not_fit_are_cut_and_counted(tasks, demo_dir):
    plan = Plan(wanted_tasks(TASKS), max_length=60, limit=2)
    result = Session(plan, World()).evaluate(str(demo_dir), tasks)
    (caveat,) = result["caveats"]["all tasks"]
    assert "longer than 60 tokens" in caveat
    with pytest.raises(ValueError, match="an answer has"):
        Session(Plan(wanted_tasks(TASKS), max_length=3), World()).evaluate(str(demo_dir), tasks)
