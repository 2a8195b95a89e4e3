"""Tasks from files: found, checked row by row, and described where they differ from the harness's own."""

import copy
import gzip
import json
from pathlib import Path

import pytest

from ladder_residual.evaluate.local import MissingFile, local_task, read_rows
from ladder_residual.evaluate.rows import pages_of
from ladder_residual.evaluate.tasks import SETS, TASKS, unknown_task, wanted_tasks
from tests.eval_files import arc, gsm8k, hellaswag, mmlu, piqa, sciq, truthfulqa, winogrande, write_lines


def test_the_table_is_what_the_harness_has():
    """Splits, examples, output and fixed shots of every task, against the harness's own files."""
    import lm_eval
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: node.value)

    def read(path):
        found = yaml.load(path.read_text(), Loader)
        return (read(path.parent / found["include"]) if "include" in found else {}) | found

    for task in TASKS.values():
        path = Path(lm_eval.__file__).parent / "tasks" / task.folder / task.yaml
        config = read(path if task.name != "mmlu" else path.parent / "mmlu_anatomy.yaml")
        assert task.name == "mmlu" or config["task"] == task.name
        assert (config.get("test_split") or config["validation_split"]) == task.split, task.name
        assert (config["output_type"] == "generate_until") == task.generates, task.name
        assert bool(config.get("unsafe_code")) == task.runs_code, task.name
        has_examples = "samples" in (config.get("fewshot_config") or {})
        assert has_examples == (task.fewshot == ""), task.name
        if task.shots and not has_examples:
            assert (config.get("fewshot_split") or config["training_split"]) == task.fewshot, task.name


def test_sets_have_the_papers_shots():
    assert {one.task.name: one.shots for one in wanted_tasks("paper-adapt")} == {
        "mmlu": 5,
        "arc_challenge": 25,
        "openbookqa": 0,
        "hellaswag": 10,
        "truthfulqa_mc1": 0,
        "gsm8k_cot": 8,
        "humaneval_plus": 0,
        "ifeval": 0,
    }
    scratch = wanted_tasks("paper-scratch")
    assert {one.shots for one in scratch} == {0}
    assert {one.task.metric for one in scratch} == {"acc", "word_perplexity"}
    assert all(one.optional for one in scratch)
    assert {name for tasks in SETS.values() for name in [task.name for task in tasks]} <= TASKS.keys()


def test_shots_for_all_or_for_one():
    found = wanted_tasks("arc_challenge, mmlu:2, blimp", "3")
    assert [(one.task.name, one.shots, one.optional) for one in found] == [
        ("arc_challenge", 3, False),
        ("mmlu", 2, False),
        ("blimp", 3, False),
    ]
    assert [one.shots for one in wanted_tasks("arc_challenge:paper,blimp")] == [25, None]
    for names, shots, message in [
        ("piqa,,sciq", "0", "empty name"),
        ("piqa,piqa", "0", "names piqa twice"),
        ("arc_easy,paper-scratch", "0", "arc_easy twice"),
        ("piqa", "five", "got 'five'"),
        ("piqa:-1", "0", "got '-1'"),
    ]:
        with pytest.raises(ValueError, match=message):
            wanted_tasks(names, shots)


def test_an_unknown_task_gets_a_near_one():
    assert "did you mean 'arc_easy'" in str(unknown_task("arc_eazy", []))
    assert "did you mean 'blimp_islands'" in str(unknown_task("blimp_ilands", ["blimp_islands", "cmmlu"]))
    assert "paper-adapt" in str(unknown_task("zzzzzz", []))


def test_files_are_found_and_differences_noted(task_folder):
    found = {
        name: local_task(TASKS[name], [task_folder], shots) for name, shots in [("arc_easy", 3), ("hellaswag", 2), ("sciq", 0)]
    }
    assert len(found["arc_easy"].rows) == 6
    assert len(found["arc_easy"].examples) == 8
    assert found["arc_easy"].caveats == [
        "6 of the 2376 rows of the test split",
        "examples from validation rows; the harness takes them from train",
    ]
    assert found["hellaswag"].examples == []  # its own rows, the harness leaves the one in question out
    assert "never the row itself" in found["hellaswag"].caveats[1]
    assert found["sciq"].caveats == ["validation rows (sciq_val.jsonl) instead of the harness's test split"]
    assert len(local_task(TASKS["wikitext"], [task_folder], 0).rows) == 2


def test_an_earlier_folder_wins_and_another_fills_in(task_folder, tmp_path):
    write_lines(tmp_path / "piqa_val.jsonl", [piqa(1), piqa(2)])
    write_lines(tmp_path / "gsm8k_train.jsonl", [gsm8k(1)] * 9)
    assert len(local_task(TASKS["piqa"], [tmp_path, task_folder], 0).rows) == 2
    assert len(local_task(TASKS["piqa"], [task_folder, tmp_path], 0).rows) == 6
    both = local_task(TASKS["gsm8k"], [task_folder, tmp_path], 8)
    assert (len(both.rows), len(both.examples)) == (6, 9)


def test_missing_and_ambiguous_files(task_folder, tmp_path):
    with pytest.raises(MissingFile, match=r"no file for task arc_challenge in .*arc_challenge_test.jsonl"):
        local_task(TASKS["arc_challenge"], [task_folder], 0)
    with pytest.raises(ValueError, match="is not a folder"):
        local_task(TASKS["piqa"], [task_folder / "none"], 0)
    (wanted,) = wanted_tasks("arc_eazy")
    with pytest.raises(ValueError, match="did you mean 'arc_easy'"):
        local_task(wanted.task, [task_folder], 0)
    write_lines(tmp_path / "piqa_val.jsonl", [piqa(1)])
    write_lines(tmp_path / "piqa_val100.jsonl", [piqa(1)])
    with pytest.raises(ValueError, match=r"piqa_val.jsonl and piqa_val100.jsonl are both validation rows"):
        local_task(TASKS["piqa"], [tmp_path], 0)


GOOD = {
    "arc_easy": arc(1),
    "openbookqa": arc(1, "question_stem"),
    "hellaswag": hellaswag(1),
    "piqa": piqa(1),
    "sciq": sciq(1),
    "winogrande": winogrande(1),
    "truthfulqa_mc1": truthfulqa(1),
    "mmlu": mmlu(1, "anatomy"),
    "gsm8k": gsm8k(1),
    "wikitext": {"page": "text"},
    "ifeval": {"key": 1, "prompt": "Say.", "instruction_id_list": ["a:b"], "kwargs": [{}]},
    "humaneval": {"task_id": "1", "prompt": "p", "canonical_solution": "c", "test": "t", "entry_point": "e"},
}


@pytest.mark.parametrize("task", GOOD)
def test_every_damaged_field_is_named_with_its_line(task, tmp_path):
    path, good = tmp_path / f"{task}_test.jsonl", GOOD[task]
    write_lines(path, [good, good])
    (kept, _) = read_rows(path, task)
    unused = set(good) - set(kept)
    assert unused <= {"id", "ind", "ctx", "mc2_targets"}
    for name in set(good) - unused:
        for bad in (None, [], {"x": []}, 99, "…"):
            if type(bad) is type(good[name]) and bad == "…" and name not in ("answer", "answerKey", "label", "sentence"):
                continue  # any text will do
            if isinstance(bad, int) and isinstance(good[name], int) and name == "key":
                continue
            row = copy.deepcopy(good) | {name: bad}
            write_lines(path, [good, row])
            with pytest.raises(ValueError, match=rf"{path.name}, line 2: not a row of {task}"):
                read_rows(path, task)
        row = copy.deepcopy(good)
        del row[name]
        write_lines(path, [row])
        with pytest.raises(ValueError, match="line 1: not a row"):
            read_rows(path, task)


def test_files_that_hold_no_rows(tmp_path):
    path = tmp_path / "piqa_val.jsonl"
    for text, message in [
        ("", "holds no row"),
        ("\n\n", "holds no row"),
        (json.dumps(piqa(1)) + "\n{\n", "line 2: not JSON"),
        ("[1]\n", "line 1: expected a JSON object"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_rows(path, "piqa")
    for name in ("piqa_val.jsonl.xz", "piqa_val.jsonl.gz", "none.jsonl"):
        if name != "none.jsonl":
            (tmp_path / name).write_bytes(b"no archive")
        with pytest.raises(ValueError, match="cannot read"):
            read_rows(tmp_path / name, "piqa")
    packed = bytearray(gzip.compress(b"x" * 1000))
    packed[12] ^= 0xFF
    (tmp_path / "piqa_val.jsonl.gz").write_bytes(packed)
    with pytest.raises(ValueError, match="cannot read"):
        read_rows(tmp_path / "piqa_val.jsonl.gz", "piqa")
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match="cannot read"):
        read_rows(path, "piqa")
    (tmp_path / "piqa_val.txt").write_text("text")
    with pytest.raises(ValueError, match="rows of piqa come as .jsonl"):
        read_rows(tmp_path / "piqa_val.txt", "piqa")


def test_the_right_answer_of_truthfulqa_comes_first(tmp_path):
    (row,) = read_rows(write_lines(tmp_path / "t.jsonl", [truthfulqa(2)]), "truthfulqa_mc1")
    right = next(answer for answer, label in truthfulqa(2)["mc1_targets"].items() if label)
    assert row["mc1_targets"]["choices"][0] == right
    hub = {"question": "?", "mc1_targets": {"choices": ["a", "b"], "labels": [0, 1]}}
    (row,) = read_rows(write_lines(tmp_path / "t.jsonl", [hub]), "truthfulqa_mc1")
    assert row["mc1_targets"] == {"choices": ["b", "a"], "labels": [1, 0]}


def test_pages_of_raw_wikitext():
    text = "\n = One = \n\n a \n = = Part = = \n b \n = Two = \n c \n"
    assert [page["page"] for page in pages_of(text)] == [" = One = \n\n a \n = = Part = = \n b \n", " = Two = \n c \n"]
