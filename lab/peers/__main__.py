"""The CUDA engine beside what a user would have otherwise: compiled blocks in one CUDA graph, and at tp=1 transformers.

python -m lab.peers                                          # the whole model on one GPU, one sequence
python -m lab.peers --phase prefill --model llama-3-70b --tp 8
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ladder_residual.cli.options import Layers, Links, Repeats, split_links, whole_numbers
from ladder_residual.distributed.launch import run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def peers(
    phase: Annotated[str, typer.Option(help="whole, decode, prefill or e2e.")] = "whole",
    model: Annotated[str, typer.Option(help="A published shape (random weights).")] = "llama-3.1-8b",
    layers: Layers = None,
    tp: Annotated[int, typer.Option("--tp", help="This GPU holds one rank of so many.")] = 1,
    batch: Annotated[str, typer.Option(help="Comma-separated.")] = "1",
    links: Links = "none;24us",
    context: Annotated[int, typer.Option(help="Tokens in the cache of a decode step.")] = 1100,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1024,
    new: Annotated[int, typer.Option(help="Tokens generated.")] = 512,
    repeats: Repeats = 20,
) -> None:
    if phase not in ("whole", "decode", "prefill", "e2e"):
        raise ValueError(f"--phase {phase!r}: choose whole, decode, prefill or e2e")
    import torch

    if not torch.cuda.is_available():
        raise ValueError("peers are measured beside the CUDA engine, and torch sees no CUDA device")
    from lab.peers.measure import decode_and_peers, e2e_and_peers, prefill_and_peers, whole_model
    from ladder_residual.engine.random_rank import RandomRank
    from ladder_residual.plan.models import resolve_model

    if phase == "whole":
        result = whole_model(model=model, context=context, repeats=repeats, layers=layers)
    else:
        rank = RandomRank(*resolve_model(model), tp, layers=layers)
        asked = {"batches": whole_numbers(batch, "batch"), "links": split_links(links), "repeats": repeats}
        if phase == "decode":
            result = decode_and_peers(rank, **asked, context=context)  # type: ignore[arg-type]
        elif phase == "prefill":
            result = prefill_and_peers(rank, **asked, prompt=prompt)  # type: ignore[arg-type]
        else:
            result = e2e_and_peers(rank, **asked, prompt=prompt, new=new)  # type: ignore[arg-type]
    for row in [*result["rows"], *result.get("peers", [])]:
        print(json.dumps(row))
    print(json.dumps(result))


if __name__ == "__main__":
    run_command(app)
