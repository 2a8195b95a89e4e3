"""``ladder eval``: parse, call, print. Everything heavy is imported inside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.files import check_can_write
from ..common.terminal import show
from ..distributed.launch import launched, on_ranks, speaks_first
from ..evaluate.markdown import render
from ..evaluate.plan import Plan, check_models, make_plan
from ..evaluate.results import save, stored_result
from ..evaluate.table import side_by_side
from .options import AllowNonfinite, Device, Dtype, Json, Ranks, Source, Timeout, Uneven, Wiring, at_least_one


def evaluate(
    source: Source,
    tasks: Annotated[
        str | None,
        typer.Option(help="Names with commas between (arc_easy,piqa,mmlu:5 ...), or a set: paper-scratch, paper-adapt."),
    ] = None,
    # Two names: torchrun takes any word that begins like one of its own options, such as --local-addr, for itself.
    local: Annotated[
        list[Path] | None,
        typer.Option("--local", "--files", help="Folder with <task>_<split>.jsonl, .gz or .xz; may be repeated."),
    ] = None,
    against: Annotated[str | None, typer.Option(help="Another model, or its result (.json): prints the differences.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N rows of each task.")] = None,
    shots: Annotated[
        str, typer.Option(help="Examples in the prompt: paper (as the paper did), or a number for all tasks.")
    ] = "paper",
    perplexity: Annotated[Path | None, typer.Option(help="Text file to measure perplexity on.")] = None,
    context: Annotated[int, typer.Option(help="Tokens a perplexity window holds.")] = 1024,
    stride: Annotated[int, typer.Option(help="Tokens between the starts of two windows.")] = 512,
    out: Annotated[Path | None, typer.Option(help="Write the result here (.json), and its table beside it (.md).")] = None,
    as_json: Json = False,
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
    allow_nonfinite: AllowNonfinite = False,
    wiring: Wiring = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    timeout: Timeout = 600.0,
) -> None:
    """Accuracy by lm-evaluation-harness and perplexity, on any number of ranks, alone or against another model."""
    at_least_one(tp=tp, limit=limit, max_length=max_length, batch_size=batch_size, batch_tokens=batch_tokens)
    if requests_out is not None and (scores_in is not None or against is not None or out is not None):
        raise ValueError("--requests-out only writes what to score: drop --scores-in, --against and --out")
    if out is not None and out.suffix != ".json":
        raise ValueError(f"--out takes a file that ends in .json, got {out}; the table goes beside it as .md")
    for file in (out, requests_out):
        if file is not None:
            check_can_write(file)
    how: dict[str, Any] = dict(tasks=tasks, files=local or [], limit=limit, shots=shots, chat=chat, allow_code=allow_code)
    how |= dict(perplexity=perplexity, context=context, stride=stride, max_length=max_length)
    how |= dict(batch_size=batch_size, batch_tokens=batch_tokens)
    plan = make_plan(how)
    if requests_out is not None or scores_in is not None:
        if (tp or 1) > 1:
            raise ValueError("--requests-out and --scores-in run no model: drop --tp")
        if requests_out is not None:
            _write_requests(source, plan, requests_out)
        elif scores_in is not None:
            _judge(source, plan, scores_in, against, out, as_json)
        return
    if speaks_first():
        check_models(source, against, tp=tp or launched(), wiring=wiring, dtype=dtype, uneven=uneven)
    on_ranks(tp, preload="ladder_residual.evaluate.run")
    from ..distributed.world import distributed
    from ..evaluate.api import evaluate as run

    how |= dict(wiring=wiring, dtype=dtype, device=device, uneven=uneven, allow_nonfinite=allow_nonfinite, timeout=timeout)
    with distributed(device, timeout) as world:
        result = run(source, against=against, **how)
        if world.is_main:
            _tell(result, out, as_json)


def _write_requests(source: str, plan: Plan, target: Path) -> None:
    from ..distributed.world import World
    from ..evaluate.run import Session, load_wanted

    requests = Session(plan, World()).requests(source, load_wanted(plan))
    requests.save(target)
    groups = ", ".join(f"{len(group)} {name}" for name, group in requests.groups.items())
    print(f"written  {target}  {len(requests)} requests ({groups})")


def _judge(source: str, plan: Plan, scores_in: Path, against: str | None, out: Path | None, as_json: bool) -> None:
    """Results from scores that were made elsewhere."""
    from ..distributed.world import World
    from ..evaluate.requests import load_scores
    from ..evaluate.run import Session, load_wanted, with_comparison

    earlier = stored_result(against) if against else None
    if against is not None and earlier is None:
        raise ValueError("--scores-in runs no model: --against takes the .json of an earlier evaluation")
    scores, session, loaded = load_scores(scores_in), Session(plan, World()), load_wanted(plan)
    if list(scores) != [""]:
        found = {name: session.from_scores(source, loaded, one, name) for name, one in scores.items()}
        _tell_all(found | ({"against": earlier} if earlier else {}), out, as_json)
        return
    result = session.from_scores(source, loaded, scores[""])
    _tell(with_comparison(result, earlier) if earlier else result, out, as_json)


def _tell(result: dict[str, Any], out: Path | None, as_json: bool) -> None:
    page = render(result)
    if out is not None:
        save(result, out)
        out.with_suffix(".md").write_text(page, encoding="utf-8")
    show(json.dumps(result) if as_json else page.removesuffix("\n"))


def _tell_all(results: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Several models' scores came in one file: each result goes to a file of its own, the table shows them side by side."""
    page = side_by_side(results) if len(results) > 1 else render(next(iter(results.values())))
    if out is not None:
        for name, result in results.items():
            save(result, out.with_name(f"{out.stem}-{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}.json"))
        out.with_suffix(".md").write_text(page, encoding="utf-8")
    show(json.dumps(results) if as_json else page.removesuffix("\n"))
