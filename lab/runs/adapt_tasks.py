"""Task accuracies of the recovered models from the scores that ``lab/runs/adapt_smollm2.py`` brought back.

    python -m lab.runs.adapt_tasks WORK/scores.json.gz smollm2 TEXTS results/adapt/tasks.json --perplexity wikitext2_test.raw

TEXTS are folders with the task files, separated by commas (``ladder eval --local``). Tasks are loaded once; no model runs here.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from ladder_residual.distributed.world import World
from ladder_residual.evaluate.harness import load_tasks
from ladder_residual.evaluate.plan import Plan
from ladder_residual.evaluate.requests import Score, Scores
from ladder_residual.evaluate.run import Session, with_comparison
from ladder_residual.evaluate.tasks import wanted_tasks

TASKS = "arc_easy:0,arc_challenge:0,piqa:0,hellaswag:0,sciq:0,winogrande:0,openbookqa:0,truthfulqa_mc1:0"
ORIGINAL = "original"


def digest(result: dict[str, Any]) -> dict[str, Any]:
    """Value and error of each task's own metric; with the difference to the original where there is one."""
    pairs = {(pair["task"], pair["metric"]): pair for pair in result.get("comparison", [])}
    found = {}
    for row in result["rows"]:
        if row["shown"]:
            entry = {key: row[key] for key in ("value", "stderr", "n", "metric", "shots")}
            if pair := pairs.get((row["task"], row["metric"])):
                entry |= {key: pair[key] for key in ("difference", "paired_stderr", "changed")}
            found[row["task"]] = entry
    return found


def scores_of(document: dict[str, Any]) -> Scores:
    return Scores({key: Score(float(logprob), bool(greedy)) for key, (logprob, greedy) in document["scores"].items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scores", type=Path)
    parser.add_argument("model", help="where the tokenizer is")
    parser.add_argument("texts")
    parser.add_argument("out", type=Path)
    parser.add_argument("--perplexity", type=Path, help="the text whose windows are among the requests")
    arguments = parser.parse_args()
    with gzip.open(arguments.scores, "rt", encoding="utf-8") as source:
        documents = json.load(source)
    folders = [Path(folder) for folder in arguments.texts.split(",")]
    plan = Plan(wanted_tasks(TASKS), folders, perplexity=arguments.perplexity)
    results: dict[str, Any] = {}
    loaded = load_tasks(plan.wanted, folders)
    session = Session(plan, World())
    for name in sorted(documents, key=lambda name: name != ORIGINAL):
        found = session.from_scores(arguments.model, loaded, scores_of(documents[name]), name)
        results[name] = found if name == ORIGINAL else with_comparison(found, results[ORIGINAL])
        print(name, {task: round(100 * entry["value"], 1) for task, entry in digest(results[name]).items()}, flush=True)
    document: dict[str, Any] = {"tasks": TASKS, "models": {name: digest(results[name]) for name in documents}}
    made = ("date", "commit", "gpu", "machine", "torch", "transformers", "wiring", "dtype")
    document["scored"] = {name: {key: found[key] for key in made if key in found} for name, found in documents.items()}
    if arguments.perplexity:
        kept = ("file", "context", "stride", "tokens", "ppl", "nats_per_token")
        document["perplexity"] = {name: {key: results[name]["perplexity"][key] for key in kept} for name in documents}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
