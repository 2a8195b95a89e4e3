"""``ladder eval``: parse, call, print. Everything heavy is imported inside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.commands import Device, Dtype, Ranks, Uneven
from ..launch import on_ranks
from .markdown import render
from .results import save
from .table import side_by_side
from .tasks import wanted_tasks

Tasks = Annotated[
    str | None, typer.Option(help="Names with commas between (arc_easy,piqa,mmlu:5 ...), or a set: paper-scratch, paper-adapt.")
]
# Two names: torchrun takes any word that begins like one of its own options, such as --local-addr, for itself.
Local = Annotated[
    list[Path] | None, typer.Option("--local", "--files", help="Folder with <task>_<split>.jsonl[.gz|.xz]; may be repeated.")
]
Against = Annotated[str | None, typer.Option(help="Another model, or its result (.json): prints the differences.")]
Shots = Annotated[str, typer.Option(help="Examples in the prompt: as the paper did, or a number for all tasks.")]
PerplexityFile = Annotated[Path | None, typer.Option("--perplexity", help="Text file to measure perplexity on.")]


def evaluate(
    source: Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")],
    tasks: Tasks = None,
    local: Local = None,
    against: Against = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N rows of each task.")] = None,
    shots: Shots = "paper",
    perplexity: PerplexityFile = None,
    context: Annotated[int, typer.Option(help="Tokens a perplexity window holds.")] = 1024,
    stride: Annotated[int, typer.Option(help="Tokens between the starts of two windows.")] = 512,
    out: Annotated[Path | None, typer.Option(help="Write the result here (.json), and its table beside it (.md).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    requests_out: Annotated[Path | None, typer.Option(help="Only write what to score (.jsonl.gz); no model runs.")] = None,
    scores_in: Annotated[
        Path | None, typer.Option(help="Take the scores from this file (of one model or several); no model runs.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put every prompt into the model's chat template.")] = False,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Run the code that the model writes (humaneval).")] = False,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a prompt; default: the model's context.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts per batch where text is generated.")] = 8,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens per batch where answers are scored.")] = None,
    tp: Ranks = None,
    uneven: Uneven = False,
    wiring: Annotated[str | None, typer.Option(help="Another wiring than the checkpoint's own.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds a rank waits for the others before it gives up.")] = 600.0,
) -> None:
    """Accuracy by lm-evaluation-harness and perplexity, on any number of ranks, alone or against another model."""
    wanted = wanted_tasks(tasks, shots) if tasks is not None else []
    if not wanted and perplexity is None:
        raise ValueError("nothing to do: give --tasks arc_easy,piqa or --perplexity FILE")
    for name, value in (
        ("limit", limit),
        ("max-length", max_length),
        ("batch-size", batch_size),
        ("batch-tokens", batch_tokens),
    ):
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if requests_out is not None and (scores_in is not None or against is not None or out is not None):
        raise ValueError("--requests-out only writes what to score: drop --scores-in, --against and --out")
    if out is not None and out.suffix != ".json":
        raise ValueError(f"--out takes a file that ends in .json, got {out}; the table goes beside it as .md")
    if requests_out is not None or scores_in is not None:
        if (tp or 1) > 1:
            raise ValueError("--requests-out and --scores-in run no model: drop --tp")
    else:
        on_ranks(tp)
    from ..parallel import distributed
    from .run import Plan, Session, check_harness, stored_result, with_comparison

    plan = Plan(wanted, local or [], limit, chat, allow_code, perplexity, context, stride, max_length, batch_size, batch_tokens)
    if wanted:
        check_harness()
    earlier = stored_result(against) if against else None
    with distributed(device, timeout) as world:
        loaded = _load(plan)
        session = Session(plan, world)
        if requests_out is not None:
            requests = session.requests(source, loaded)
            requests.save(requests_out)
            groups = ", ".join(f"{len(group)} {name}" for name, group in requests.groups.items())
            print(f"written  {requests_out}  {len(requests)} requests ({groups})")
            return
        if scores_in is not None:
            from .requests import load_scores

            if against is not None and earlier is None:
                raise ValueError("--scores-in runs no model: --against takes the .json of an earlier evaluation")
            scores = load_scores(scores_in)
            if list(scores) != [""]:
                found = {name: session.from_scores(source, loaded, one, name) for name, one in scores.items()}
                _tell_all(found | ({"against": earlier} if earlier else {}), out, as_json)
                return
            result = session.from_scores(source, loaded, scores[""])
        else:
            result = session.evaluate(source, loaded, wiring=wiring, dtype=dtype, uneven=uneven)
        if against is not None:
            result = with_comparison(result, earlier or session.evaluate(against, loaded, dtype=dtype, uneven=uneven))
        if world.is_main:
            _tell(result, out, as_json)


def _load(plan: Any) -> Any:
    if not plan.wanted:
        return None
    from .harness import load_tasks

    return load_tasks(plan.wanted, plan.folders, allow_code=plan.allow_code)


def _tell(result: dict[str, Any], out: Path | None, as_json: bool) -> None:
    page = render(result)
    if out is not None:
        save(result, out)
        out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(json.dumps(result) if as_json else page, end="\n" if as_json else "")


def _tell_all(results: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Several models' scores came in one file: each result goes to a file of its own, the table shows them side by side."""
    page = side_by_side(results) if len(results) > 1 else render(next(iter(results.values())))
    if out is not None:
        for name, result in results.items():
            save(result, out.with_name(f"{out.stem}-{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}.json"))
        out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(json.dumps(results) if as_json else page, end="\n" if as_json else "")
