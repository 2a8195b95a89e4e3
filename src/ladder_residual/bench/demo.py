"""``ladder demo``: the whole idea in under a minute, offline, on the tiny pretrained model the package ships.

Convert it, look at what the conversion costs before any retraining, generate the same text on one and on two processes, and
measure how much of a slow link each wiring hides.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from ..distributed.launch import launch, run_command

PROMPT = "Once upon a time, there was a little girl"
WIRINGS = ("standard", "ladder:last-half", "ladder")
RANKS = 2
NEW_TOKENS = 60
LATENCY_SECONDS = 3e-4  # about the time of one module of this model on a small host


def demo_directory() -> Path:
    """The shipped checkpoint (stories260K, see its NOTICE.md)."""
    return Path(str(resources.files("ladder_residual").joinpath("assets", "demo")))


def export_demo(target: str | Path) -> Path:
    """Write the tiny checkpoint that the package ships, to try everything else on without a network.

    Args:
        target: Directory to write.

    Returns:
        The directory. It holds a Llama of 5 layers and 260 thousand parameters, and ``stories.txt``, text that it was not trained on.

    Examples:
        >>> export_demo("stories-copy").name
        'stories-copy'
    """
    from ..models.checkpoint_writer import new_directory

    with new_directory(target) as directory:
        for file in demo_directory().iterdir():
            directory.copy(file, file.name)
    return Path(target)


def zero_shot_loss(directory: Path, wiring: str, stories: int = 20) -> float:
    """Mean next-token loss, in nats, on stories the model was not trained on, before any retraining."""
    import torch

    from ..generation.tokenizer import load_tokenizer
    from ..models.loading import load_model

    tokenizer = load_tokenizer(directory)
    model = load_model(directory, wiring=wiring)
    text = (demo_directory() / "stories.txt").read_text(encoding="utf-8").split("\n\n")[:stories]
    batch = tokenizer(text, return_tensors="pt", padding=True, truncation=True, max_length=256, return_token_type_ids=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.inference_mode():
        return model(**batch, labels=labels).loss.item()


def rank_main(workdir: Path) -> None:
    """What each of the two ranks does: generate with every wiring, then measure them over a slow link."""
    from ..distributed.world import distributed
    from ..generation.completion import complete
    from ..generation.sampling import Sampling
    from ..generation.tokenizer import load_tokenizer
    from ..models.loading import load_model
    from .overlap import measure_overlap

    with distributed("cpu") as world:
        directory = demo_directory()
        tokenizer = load_tokenizer(directory)
        greedy = Sampling(max_new_tokens=NEW_TOKENS, temperature=0)
        texts = {}
        for wiring in WIRINGS:
            model = load_model(directory, world, wiring=wiring)
            texts[wiring] = complete(model, tokenizer, [PROMPT], greedy, world)[0].text
        model = load_model(directory, world)
        result = measure_overlap(world, model=model, wirings=list(WIRINGS), latency=LATENCY_SECONDS, repeats=40)
        if world.is_main:
            (workdir / "ranks.json").write_text(json.dumps({"texts": texts, "overlap": result}), encoding="utf-8")


def run(write: Callable[[str], None]) -> dict[str, Any]:
    """All of it; ``write`` prints a line. Returns what was measured."""
    from rich.console import Console
    from rich.table import Table

    from ..distributed.world import World
    from ..generation.completion import complete
    from ..generation.sampling import Sampling
    from ..generation.tokenizer import load_tokenizer
    from ..models.convert import convert, describe
    from ..models.loading import load_model

    with tempfile.TemporaryDirectory(prefix="ladder-demo-") as scratch:
        workdir = Path(scratch)
        write("1. Convert the shipped model (stories260K: 5 layers, 260 thousand parameters). Only its config changes.\n")
        conversion = convert(demo_directory(), workdir / "ladder", "ladder")
        describe(conversion, lambda line: write("   " + line))
        tokenizer = load_tokenizer(conversion.target)
        greedy = Sampling(max_new_tokens=NEW_TOKENS, temperature=0)
        write("\n2. Generate, one process, and measure the loss of the conversion before any retraining.\n")
        texts, losses = {}, {}
        for wiring in WIRINGS:
            model = load_model(conversion.target, wiring=wiring)
            texts[wiring] = complete(model, tokenizer, [PROMPT], greedy, World())[0].text
            losses[wiring] = zero_shot_loss(conversion.target, wiring)
            write(f"   [{wiring}] {PROMPT}{texts[wiring].replace(chr(10), ' ')} ...")
        write(f"\n3. The same on {RANKS} processes (tensor parallel), over a link slowed by {1e6 * LATENCY_SECONDS:.0f} us.\n")
        if launch([str(workdir)], RANKS, module="ladder_residual.bench.demo") != 0:
            raise RuntimeError("the two-process part of the demo failed; its messages are above")
        ranks = json.loads((workdir / "ranks.json").read_text(encoding="utf-8"))
    overlap = ranks["overlap"]
    same = ranks["texts"] == texts
    table = Table(title=f"{RANKS} processes, {overlap['link']}")
    for column in ("wiring", "tokens/s", "speed-up", "hidden", "zero-shot loss", f"same text on 1 and {RANKS}"):
        table.add_column(column, justify="left" if column == "wiring" else "right")
    for row in overlap["rows"]:
        wiring = row["wiring"]
        measured = wiring in losses
        hidden = "" if row["hidden_percent"] is None else f"{row['hidden_percent']:.0f} %"
        table.add_row(
            wiring if measured else "no communication (bound)",
            f"{row['tokens_per_s']:.0f}",
            f"{row['speedup']:.2f}x",
            hidden if wiring not in ("standard", "no-comm") else "",
            f"{losses[wiring]:.3f}" if measured else "",
            ("yes" if ranks["texts"][wiring] == texts[wiring] else "NO") if measured else "",
        )
    drawn = io.StringIO()
    Console(file=drawn, width=110).print(table)
    write(drawn.getvalue())
    write(
        f"A step computes for {overlap['compute_ms']:.1f} ms and sends for {overlap['communication_ms']:.1f} ms (latency emulated). "
        f"Loss is before retraining, in nats\n(the paper retrains half the layers of an 8B model on 3B tokens to bring it back). "
        f"Text on {RANKS} processes " + ("equals" if same else "DIFFERS FROM") + " the text on one."
    )
    if not same:
        raise RuntimeError("the text on several processes differs from the text on one: this is a bug, please report it")
    return {"losses": losses, "same_text": same, **ranks}


if __name__ == "__main__":  # one of the ranks
    run_command(lambda: rank_main(Path(sys.argv[1])))
