"""docs/results/evaluation.md: SmolLM2 before and after zero-shot conversion (results/eval) and quantisation (results/quantisation)."""

from __future__ import annotations

from typing import Any

from lab.reports.sources import ROOT, conditions, page, read_results, section
from ladder_residual.common.markdown import table
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
            "Evaluation",
            about,
            [
                section("SmolLM2, zero-shot", reading, side_by_side(results), command=command),
                *(quantised(stem, result) for stem, result in read_results("quantisation").items()),
            ],
        )
    }


def quantised(stem: str, result: dict[str, Any]) -> str:
    tokens = result["rows"] * result["sequence"]
    reading = (
        "`ladder convert --quantize` rounds to the nearest number; *refit* adds `--refit TEXT`, here "
        f"{result['calibration_tokens']:,} tokens of other books, arithmetic and WikiText-2's validation split. Measured on {tokens:,} "
        f"tokens of its test split in rows of {result['sequence']}, in float32; rises are paired, with their standard error. The "
        "checkpoint was made from published 4-bit weights."
    )
    rows = [
        [
            result["weights"][name] + (", refit" if name.endswith(" refit") else ""),
            f"{result['weight_error_percent'][name]:.1f} %",
            f"{found['perplexity']:.2f}",
            f"{found['rise_percent']:+.2f} ± {found['rise_percent_stderr']:.2f} %" if name != "bf16" else "",
        ]
        for name, found in result["results"].items()
    ]
    body = table(["weights", "error of the weights", "perplexity", "rise"], rows) + f"\n{conditions(result)}"
    amounts = f"--rows {result['rows']} --tokens {result['calibration_tokens']}"
    command = f"python -m lab.runs.quantised_perplexity {result['model']} TEXTS {amounts}"
    return section("SmolLM2, quantised weights", reading, body, command=command)
