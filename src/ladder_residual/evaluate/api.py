"""``evaluate`` of the Python API; ``ladder eval`` prints what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..distributed.call import call_on_ranks
from ..distributed.launch import missing_ranks
from ..distributed.world import distributed
from .plan import check_models, make_plan
from .results import Result, stored_result
from .run import Session, load_wanted, with_comparison

TIMEOUT_SECONDS = 600.0  # a rank may wait longer here than when it generates: rank 0 loads tasks and judges answers


def evaluate(
    source: str | Path,
    *,
    tasks: str | Sequence[str] | None = None,
    perplexity: str | Path | None = None,
    against: str | Path | None = None,
    files: str | Path | Sequence[str | Path] = (),
    limit: int | None = None,
    shots: str | int = "paper",
    context: int = 1024,
    stride: int = 512,
    chat: bool = False,
    allow_code: bool = False,
    max_length: int | None = None,
    batch_size: int = 8,
    batch_tokens: int | None = None,
    tp: int | None = None,
    wiring: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    uneven: bool = False,
    allow_nonfinite: bool = False,
    timeout: float = TIMEOUT_SECONDS,
) -> Result:
    """Accuracy by lm-evaluation-harness and perplexity, on any number of ranks, alone or against another model.

    With ``tp`` above 1 in a plain script or notebook the ranks are started for this call. Under torchrun every rank calls this with
    the same arguments and gets the same result. Tasks need ``pip install 'ladder-residual[eval]'``, perplexity does not.

    Args:
        source: Checkpoint directory or hub id.
        tasks: Names, ``name:shots``, or a set (``"paper-scratch"``, ``"paper-adapt"``): a list, or one string with commas between.
        perplexity: Text file to measure perplexity on.
        against: Another model, or the ``.json`` of an earlier result: the differences are added, with paired standard errors.
        files: Folders with ``<task>_<split>.jsonl``, to read tasks from instead of the hub.
        limit: Only the first rows of each task.
        shots: Examples in the prompt: ``"paper"``, or a number for all tasks.
        context: Tokens a perplexity window holds.
        stride: Tokens between the starts of two windows.
        chat: Put every prompt into the model's chat template.
        allow_code: Run the code that the model writes (humaneval).
        max_length: Tokens of a prompt. Default: the model's context.
        batch_size: Prompts per batch where text is generated.
        batch_tokens: Tokens per batch where answers are scored.
        tp: Number of tensor-parallel ranks. Default: as many as the launcher started, else 1.
        wiring: Another wiring than the checkpoint's own.
        dtype: ``"auto"`` (as stored), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        uneven: Allow ranks with unequal numbers of heads.
        allow_nonfinite: Load weights that hold NaN or infinite numbers all the same.
        timeout: Seconds a rank waits for the others.

    Returns:
        What ``ladder eval --out`` writes as JSON: ``rows`` (a task and metric each, with ``value`` and ``stderr``), ``perplexity``
        (``ppl``, ``nats_per_token``, ``bits_per_byte`` ...), ``comparison``, and how it was made.

    Examples:
        >>> result = evaluate("stories", perplexity="stories/stories.txt", context=256, stride=256, wiring="ladder:last-half")
        >>> result["wiring"], result["perplexity"]["ppl"] > 1
        ('ladder:3-4', True)
    """
    arguments = locals()
    plan = make_plan(arguments)
    if missing_ranks(tp):
        assert tp is not None
        check_models(source, against, tp=tp, wiring=wiring, dtype=dtype, uneven=uneven)
        return dict(call_on_ranks(evaluate, tp, arguments, timeout))
    earlier = stored_result(str(against)) if against is not None else None
    with distributed(device, timeout) as world:
        loaded, session = load_wanted(plan), Session(plan, world)
        how: dict[str, Any] = {"dtype": dtype, "uneven": uneven, "allow_nonfinite": allow_nonfinite}
        result = session.evaluate(str(source), loaded, wiring=wiring, **how)
        if against is not None:
            result = with_comparison(result, earlier or session.evaluate(str(against), loaded, **how))
        return result
