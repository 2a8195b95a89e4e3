"""docs/results/evaluation.md from results/eval: SmolLM2 before and after zero-shot conversion."""

from __future__ import annotations

from lab.reports.sources import ROOT, page, section
from ladder_residual.evaluate.results import load
from ladder_residual.evaluate.table import side_by_side

SHOWN = {"original": "smollm2-original", **{f"zero-shot {layers}": f"smollm2-zero-shot-{layers}" for layers in (15, 20, 30)}}


def pages() -> dict[str, str]:
    results = {name: load(ROOT / "results" / "eval" / f"{stem}.json") for name, stem in SHOWN.items()}
    reading = (
        "Conversion of the last 15, 20 and all 30 layers, nothing retrained. Most tasks are subsets of the published sets "
        "(*rows*); [recovery.md](recovery.md) has the recovered models."
    )
    files = " ".join(f"{name.replace(' ', '-')}=results/eval/{stem}.json" for name, stem in SHOWN.items())
    command = f"python -m ladder_residual.evaluate.table {files}"
    about = "The guide is [../evaluation.md](../evaluation.md)."
    return {
        "evaluation.md": page(
            "Evaluation", about, [section("SmolLM2, zero-shot", reading, side_by_side(results), command=command)]
        )
    }
