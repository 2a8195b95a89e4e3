"""docs/results/serving.md from results/serve and the planner: vLLM on a GPU, on CPU ranks, and what is planned for several GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.reports.sources import conditions, page, read_results, section
from lab.serving import gpu_tables, load, one_rank
from ladder_residual.common.markdown import table
from ladder_residual.plan.api import plan

LINKS = {
    "one-shot": "one-shot (NVLink, custom or fused all-reduce)",
    "nccl": "NCCL over NVLink",
    "nccl-no-p2p": "NCCL without peer-to-peer",
    "ib-2-nodes": "InfiniBand, two nodes",
    "10gbe": "10 Gb Ethernet",
}
GPU = "gpu"  # results of lab.serving.gpu: gpu.json, gpu-more.json and so on
PLAN = f"ladder plan --model llama-3-70b --device h100 --tp 8 --link {','.join(LINKS)} --batch 1,16 --engine compiled"


def pages() -> dict[str, str]:
    return {"serving.md": render(read_results("serve"))}


def render(results: Mapping[str, Any]) -> str:
    two, one = results["cpu-tp2"], results["cpu-tp1"]
    sections = [
        *on_one_card({name: result for name, result in results.items() if name.startswith(GPU)}),
        section(
            "Two ranks on CPU",
            f"{two['model']}, float32, compiled, one core a rank, a link of {two['link']} (one module's compute), "
            f"{two['prompt_tokens']} + {two['new_tokens']} tokens, medians of {two['rounds']} alternating rounds. "
            "`no-comm` is the bound: it never reduces.",
            load.markdown_table(two),
            command="python -m lab.serving.load --out results/serve/cpu-tp2.json",
            made=conditions(two),
        ),
        section(
            "One rank on CPU",
            "CPU time of a step against vLLM's own model, which takes part twice: the distance between its two rows is "
            "the noise. On one rank there is nothing to hide, so a wiring should cost nothing.",
            one_rank.markdown_table(one),
            command="python -m lab.serving.one_rank --out results/serve/cpu-tp1.json",
            made=conditions(one),
        ),
        section(
            "Planned: Llama-3-70B on 8 H100",
            "Planned, not measured; speed-up over standard. On one NVLink machine vLLM's fused all-reduce leaves little "
            "to hide; between machines or without peer-to-peer a ladder hides most of it.",
            planned_table(),
            command=PLAN,
        ),
    ]
    return page("Serving with vLLM", "The guide is [../serving.md](../serving.md).", sections)


def on_one_card(results: Mapping[str, Any]) -> list[str]:
    """What was measured on a GPU; the first section says how."""
    found: list[str] = []
    for title, reading, body in gpu_tables.sections(results.values()):
        runs = (f"--out results/serve/{name}.json --parts {','.join(result['parts'])}" for name, result in results.items())
        command = "" if found else "` and `".join(f"python -m lab.serving.gpu {run}" for run in runs)
        made = "" if found else conditions(*(result["environment"] for result in results.values()))
        found.append(section(title, reading, body, command=command, made=made))
    return found


def planned_table() -> str:
    """What the command above prints, computed in this process."""
    rows = plan("llama-3-70b", device="h100", tp=[8], link=list(LINKS), batch=[1, 16], engine="compiled")
    lines = [
        [
            LINKS[row.link],
            row.batch,
            f"{row.allreduce_us:.1f} us",
            *(f"{row.speedup[wiring]:.2f}x" for wiring in ("ladder", "ladder:last-half", "no-comm")),
        ]
        for row in rows
    ]
    return table(["link", "batch", "all-reduce", "all layers", "last half", "no communication"], lines)
