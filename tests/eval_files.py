"""Small task files for the evaluation's tests, in the forms in which such files come."""

import gzip
import json
import lzma

TASKS = "arc_easy:3,piqa:0,hellaswag:2,winogrande:0,sciq:0,openbookqa:0,truthfulqa_mc1:0,wikitext:0,mmlu:5"
THINGS = ["ball", "cat", "dog", "tree", "box", "bird", "park", "car", "book", "toy", "girl", "boy"]


def write_lines(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


def pick(number):
    return THINGS[number % len(THINGS)]


def arc(number, field="question"):
    choices = {"text": [f"a {pick(number + i)}" for i in range(4)], "label": ["A", "B", "C", "D"]}
    return {
        "id": str(number),
        field: f"What did Tim see in the {pick(number + 5)}?",
        "choices": choices,
        "answerKey": "ABCD"[number % 4],
    }


def piqa(number):
    return {
        "goal": f"play with the {pick(number)}",
        "sol1": "go to the park and have fun",
        "sol2": f"the the {pick(number + 1)} of",
        "label": number % 2,
    }


def hellaswag(number):
    return {
        "ind": number,
        "activity_label": "Playing",
        "ctx_a": f"Lily has a {pick(number)} [title] and a {pick(number + 3)}.",
        "ctx_b": "she",
        "ctx": "",
        "endings": [f"likes the {pick(number + i)} [step] a lot." for i in range(4)],
        "label": str(number % 4),
    }


def winogrande(number):
    sentence = f"The {pick(number)} did not fit in the {pick(number + 2)} because the _ was too big."
    return {"sentence": sentence, "option1": pick(number), "option2": pick(number + 2), "answer": str(1 + number % 2)}


def sciq(number):
    wrong = {f"distractor{i}": pick(number + i) for i in (1, 2, 3)}
    return {
        "question": f"What says {pick(number)}?",
        "correct_answer": pick(number),
        "support": "" if number % 2 else "A fact.",
        **wrong,
    }


def truthfulqa(number):
    targets = {f"It is a {pick(number + i)}.": int(i == number % 3) for i in range(3)}
    return {"question": f"What is a {pick(number)}?", "mc1_targets": targets, "mc2_targets": targets}


def mmlu(number, subject):
    return {
        "question": f"Where is the {pick(number)}?",
        "subject": subject,
        "choices": ["here", "there", "up", "in"],
        "answer": number % 4,
    }


def gsm8k(number):
    return {
        "question": f"Tom has {number} and gets 2 more. How many?",
        "answer": f"{number} + 2 = {number + 2}\n#### {number + 2}",
    }


def write_tasks(folder, rows=6):
    """A folder with rows for most tasks, under several kinds of name and packing."""
    folder.mkdir()
    some = range(rows)
    write_lines(folder / "arc_easy_test.jsonl", map(arc, some))
    write_lines(folder / "arc_easy_val.jsonl.gz", (arc(number + 50) for number in range(8)))
    write_lines(folder / "piqa_val.jsonl.xz", map(piqa, some))
    write_lines(folder / "hellaswag_val1000.jsonl.xz", map(hellaswag, some))
    write_lines(folder / "winogrande_xl_val.jsonl", map(winogrande, some))
    write_lines(folder / "sciq_val.jsonl", map(sciq, some))
    write_lines(folder / "openbookqa_test.jsonl", (arc(number, "question_stem") for number in some))
    write_lines(folder / "truthfulqa_mc.jsonl", map(truthfulqa, some))
    subjects = ("anatomy", "world_religions")
    write_lines(folder / "mmlu_test4.jsonl", (mmlu(number, subject) for subject in subjects for number in range(3)))
    write_lines(folder / "mmlu_dev.jsonl", (mmlu(number + 7, subject) for subject in subjects for number in range(5)))
    write_lines(folder / "gsm8k_test.jsonl", map(gsm8k, some))
    pages = "".join(
        f" = The {pick(n)} = \n\n Once upon a time there was a {pick(n)} .\n\n = = More = = \n\n It was big .\n" for n in (1, 2)
    )
    (folder / "wikitext2_test.raw").write_text(pages)
    return folder


def figures(result):
    return {(row["task"], row["metric"]): (row["value"], row["stderr"], row["n"], row["shots"]) for row in result["rows"]}
