"""``ladder convert SRC DST --wiring auto``: choose the layers on a calibration text, say why, keep the curves beside the checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..core.config import Wiring

SEQUENCE = 256  # many short rows tell chance from cost better than few long ones
# What a choice may cost: minutes on two cores for a model of 135M parameters, seconds on a GPU.
TOKENS = {"cpu": 2048, "cuda": 65_536}
WIDTH = {"cpu": 2, "cuda": 8}  # additions tried per step
POINTS = {"cpu": 4, "cuda": None}  # sizes on each curve; None: every size
FILE = "selection.json"


@dataclass(frozen=True)
class Request:
    """What the user asked for: a number of layers, or a rise of the loss that must not be exceeded."""

    calibration: str
    layers: int | None = None
    budget: float | None = None
    check: str | None = None  # another text; default: the rest of the calibration text
    tokens: int | None = None
    refit: str | None = None  # a text: what a layer costs is measured after refitting it on this one
    refit_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.layers is None) == (self.budget is None):
            raise ValueError("--wiring auto needs either --layers K (how many) or --budget NATS (how much loss)")
        if self.tokens is not None and self.tokens < 2 * SEQUENCE:
            raise ValueError(f"--calibration-tokens must be at least {2 * SEQUENCE} (two rows), got {self.tokens}")


def choose(source: str, request: Request, device: str = "auto") -> tuple[str, dict[str, Any]]:
    """The wiring, and the document that says why: costs of single layers, chosen sets, curves on both texts."""
    from ..models.preflight import check_source
    from .preflight import check_amount

    checked = check_source(source)
    config = checked.fields
    check_amount(request.layers, request.budget, config["num_hidden_layers"])  # before torch is imported
    measured_on = [Path(text).resolve() for text in (request.calibration, request.check) if text is not None]
    if request.refit is not None and Path(request.refit).resolve() in measured_on:
        raise ValueError(f"--refit {request.refit} is measured on too (--calibration, --check): give one of them another text")

    import torch

    from ..data.encoder import Encoder
    from ..data.tokenizer import read_tokenizer
    from ..distributed.world import distributed
    from ..models.loading import load_model
    from .probe import Probe
    from .select import curves, select

    encoder = Encoder(read_tokenizer(source), int(config["vocab_size"]))
    sequence = min(SEQUENCE, int(config.get("max_position_embeddings") or SEQUENCE))
    with distributed(device) as world:
        if world.size > 1:
            raise ValueError(f"layers are chosen by one process, {world.size} were started")
        wanted = max(2, (request.tokens or TOKENS[world.device.type]) // sequence)
        calibration, check = texts(request, encoder, sequence, wanted)
        kind, phases = world.device.type, Phases(4 if request.refit is None else 5)
        model = load_model(source, world, wiring=None, dtype="bf16" if kind == "cuda" and request.refit is None else "fp32")
        refitted: Any = None
        if request.refit is not None:
            from .refit import Refit
            from .refit_checkpoint import calibration as rows_to_fit

            rows, count = rows_to_fit(checked, request.refit, request.refit_tokens, world)[0], config["num_hidden_layers"]
            with phases("each layer refitted", count) as bar:
                every = Refit(model, Wiring.parse("ladder", count), rows, getattr(torch, checked.dtype))
                refitted = every.alone(bar.update)
        probe = Probe(model, torch.from_numpy(calibration), converted=refitted)
        selection = select(probe, request.layers, budget=request.budget, width=WIDTH[kind], phase=phases)
        size = request.layers if request.layers is not None else selection.within(request.budget or 0.0)
        sizes = some_sizes(selection.chosen, size, POINTS[kind])
        found, originals = {"calibration": curves(probe, selection, sizes, phases)}, {"calibration": probe.original.loss}
        other = Probe(model, torch.from_numpy(check), converted=refitted)
        found["held-out"] = curves(other, selection, sizes, phases)
        originals["held-out"] = other.original.loss
    if size == 0:
        cheapest = selection.chosen[1]
        raise ValueError(
            f"no layer stays within the budget of {request.budget} nats: the cheapest, layer {cheapest.layers[0]}, costs "
            f"{cheapest.loss - selection.original_loss:.4f}; raise --budget (retraining recovers far more than that)"
        )
    layers = selection.chosen[size].layers
    spec = Wiring("ladder", layers, selection.layers).spec
    document = {
        "wiring": spec,
        "layers": list(layers),
        "asked": {"layers": request.layers, "budget": request.budget},
        "calibration": {"file": Path(request.calibration).name, "tokens": int(calibration.size)},
        "refit": request.refit and Path(request.refit).name,
        "check": {"file": Path(request.check or request.calibration).name, "tokens": int(check.size)},
        "original": originals,
        "single": [{"layer": layer, "loss": cost.loss, "kl": cost.kl} for layer, cost in enumerate(selection.single)],
        "chosen": [{"k": k, "layers": list(cost.layers), "why": selection.reasons[k]} for k, cost in selection.chosen.items()],
        "curves": found,
        "passes": round(selection.passes, 1),
    }
    return spec, document


def texts(request: Request, encoder: Any, sequence: int, rows: int) -> tuple[Any, Any]:
    """Rows of tokens to choose on and to check on; from one file they are different rows of it."""
    if request.check:
        return full_rows(request.calibration, encoder, sequence, rows, 2), full_rows(request.check, encoder, sequence, rows, 1)
    both = full_rows(request.calibration, encoder, sequence, 2 * rows, 4)
    half = len(both) // 2
    return both[:half], both[half : 2 * half]


def full_rows(path: str, encoder: Any, sequence: int, most: int, least: int) -> Any:
    """The first ``most`` rows without padding; no more is read, and no hub of chats (all padded) to its end."""
    import numpy as np

    from ..data.encoder import PADDING
    from ..data.packing import pack

    packed = islice(pack(encoder.chunks(path), sequence, encoder.end, "split"), 100 * most)
    found = list(islice((ids for ids, use in packed if PADDING not in use), most))
    if len(found) < least:
        raise ValueError(
            f"{path} gives {len(found)} full rows of {sequence} tokens, and at least {least} are needed: give more text, and "
            f"documents rather than chats, whose rows are padded"
        )
    return np.array(found, np.int64)


def some_sizes(sizes: Iterable[int], size: int, most: int | None) -> list[int]:
    """At most ``most`` of the sizes, evenly apart, and ``size`` among them."""
    every = sorted(sizes)
    if most is None or len(every) <= most:
        return every
    evenly = {every[round((len(every) - 1) * step / (most - 1))] for step in range(1, most)}
    return sorted(evenly | {size} - {0})


def save(document: dict[str, Any], target: Path, write: Callable[[str], None] = print) -> None:
    """``selection.json`` and the plot, in the converted checkpoint."""
    from ..common.charts import chart_svg
    from .selection_chart import selection_chart

    (target / FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (target / "selection.svg").write_text(chart_svg(selection_chart(document)), encoding="utf-8")
    write(f"curves   {FILE}, selection.svg")


def explain(document: dict[str, Any], write: Callable[[str], None] = print) -> None:
    """Which layers and why, in a few lines."""
    size = len(document["layers"])
    single = sorted(document["single"], key=lambda entry: entry["kl"])
    write(f"chosen   {document['wiring']} ({size} layers): {document['chosen'][size - 1]['why']}")
    for label, end in (("cheap", single[:5]), ("costly", single[: -min(6, len(single)) : -1])):
        write(f"{label:8} " + ", ".join(f"layer {entry['layer']} {entry['kl']:.4f}" for entry in end) + "  (KL of each alone)")
    for text in ("calibration", "held-out"):
        curves = document["curves"][text]
        rises = {order: next(p["rise"] for p in points if p["k"] == size) for order, points in curves.items()}
        write(
            f"{text:12} loss {document['original'][text]:.4f}, rises by "
            + ", ".join(f"{rise:.4f} ({order})" for order, rise in rises.items())
        )
    curves = document["curves"]["held-out"]
    worse = [ours["k"] for ours, last in zip(curves["ours"], curves["last-k"], strict=True) if ours["loss"] > last["loss"]]
    if worse:
        write(f"note     on the held-out text the last k layers are better at k = {', '.join(map(str, worse))}")


class Phases:
    """A tqdm bar with the time left for each phase, on standard error; a line now and then where nobody watches."""

    def __init__(self, count: int) -> None:
        self.count, self.begun = count, 0

    def __call__(self, name: str, total: int) -> Any:
        from tqdm import tqdm

        self.begun += 1
        return tqdm(
            total=total,
            desc=f"{self.begun}/{self.count} {name}",
            bar_format="{desc:22} {percentage:3.0f} % |{bar:30}| {elapsed}, {remaining} left",
            mininterval=0.1 if sys.stderr.isatty() else 20,
            miniters=1,  # tqdm would wait for as many layers as the largest step had, and steps get shorter
        )
