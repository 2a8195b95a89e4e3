"""docs/results/engine.md from results/engine: decode by batch, link and size, prompts and whole generations, peers, tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.reports.sources import conditions, page, read_results, section
from ladder_residual.common.markdown import table

ABOUT = """**Emulated**: one GPU holds one rank's shard and runs its real kernels;
every all-reduce is a copy that lasts as long as the link says ([../engine.md](../engine.md)). Random weights, bfloat16. Wirings of a
row are timed alternately. What did not work is in [../lab/engine.md](../lab/engine.md)."""
SEVENTY = "Llama-3-70B, a rank of TP=8, emulated"
RUN = "python -m lab.runs.engine_70b --parts"
SIZES = (
    "llama-3.2-1b-tp8", "llama-3.2-3b-tp8", "llama-3.1-8b-tp8", "codellama-34b-tp8", "llama-3-70b-tp8", "llama-3.1-405b-tp16",
)  # fmt: skip
# What transformers' SDPA attention is compared with, token by token.
COMPARED = {
    "generate-smollm2-batch1": "the engine, batch 1",
    "generate-smollm2": "the engine, batch 6",
    "generate-smollm2-control": "transformers' eager attention",
}


def pages() -> dict[str, str]:
    return {"engine.md": render(read_results("engine"))}


def render(results: Mapping[str, Any]) -> str:
    decode = [results[f"70b-tp8-{stem}"] for stem in ("batch1", "batch4", "batch16", "batch64", "no-pdl")]
    sizes = [results[f"sizes-{name}"] for name in SIZES]
    prompts = [results["70b-tp8-prefill"]]
    whole = [results[f"70b-tp8-e2e-batch{batch}"] for batch in (1, 4, 16, 64)]
    beside = [results["70b-tp8-peers"], results["70b-tp8-prefill-peers"], results["70b-tp8-e2e-peers"]]
    one_gpu = results["8b-tp1-peers"]
    compared = {name: results[stem] for stem, name in COMPARED.items()}
    sections = [
        section(
            f"Decode: {SEVENTY}",
            "Ladder wins on every link, and on fast ones it is faster than standard without any communication (*over the bound*). "
            "An all-reduce such as NCCL's cannot be launched before its message is complete: those are the rows `no-pdl`.",
            decode_table(decode),
            command=f"{RUN} batch1,batches,no-pdl",
            made=f"Medians; p10 and p90 lie within {spread(decode):.1f} %. Context {decode[0]['context']}. {conditions(*decode)}",
        ),
        section(
            "Decode by model size: batch 1, emulated",
            "The smaller the model, the larger the part of a step that is communication. 405B is a rank of TP=16, the others of "
            "TP=8.",
            sizes_table(sizes),
            command="python -m lab.runs.engine_sizes --links 24us,64us",
            made=conditions(*sizes),
        ),
        section(
            f"Prompts and whole generations: {SEVENTY}",
            "A prompt of 1,024 tokens sends 16 MB per sequence and all-reduce. A generation is such a prompt and 512 new tokens.",
            prompts_table(prompts, whole),
            command=f"{RUN} prefill,e2e",
            made=conditions(*prompts, *whole),
        ),
        section(
            "Beside other engines",
            "*Compiled blocks* are one torch.compile function for all layers and one CUDA graph. They prefill faster without a link, "
            "because our host launches a prompt's kernels one by one.",
            peers_table(one_gpu, beside),
            command=f"{RUN} peers,beside",
            made=conditions(one_gpu, *beside),
        ),
        section(
            "Greedy tokens of SmolLM2 equal to transformers'",
            "In float32 all are equal. In 16 bits near ties fall either way, as they do between transformers' own SDPA and eager "
            "attention.",
            tokens_table(compared),
            command="python -m lab.runs.engine_real_checkpoint smollm2",
            made=conditions(*compared.values()),
        ),
    ]
    return page("CUDA engine", ABOUT, sections)


def by_setting(results: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], dict[str, Mapping[str, Any]]]:
    """Rows by batch and link, then by wiring; of a step without a link that several runs have, the first."""
    found: dict[tuple[int, str], dict[str, Mapping[str, Any]]] = {}
    for result in results:
        for row in result["rows"]:
            found.setdefault((row["batch"], row["link"]), {}).setdefault(row["wiring"], row)
    return found


def decode_table(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for (batch, link), wirings in by_setting(results).items():
        standard, ladder = wirings["standard"], wirings["ladder"]
        other = [f"{wirings[name]['over_standard']:.2f}x" if name in wirings else None for name in ("parallel", "desync-2x")]
        rows.append(
            [
                batch,
                link,
                f"{standard['ms_per_token']:.2f}",
                f"{ladder['ms_per_token']:.2f}",
                f"**{ladder['over_standard']:.2f}x**",
                *other,
                f"{ladder['of_no_comm_bound']:.2f}x",
                ladder["schedule"],
            ]
        )
    header = [
        "batch",
        "link",
        "standard, ms",
        "ladder, ms",
        "ladder",
        "parallel",
        "desync-2x",
        "ladder over the bound",
        "schedule",
    ]
    return table(header, rows)


def spread(results: Iterable[Mapping[str, Any]]) -> float:
    """How far p10 and p90 lie from the median at most, in per cent."""
    rows = [row for result in results for row in result["rows"]]
    return max(100 * abs(row[edge] / row["ms_per_token"] - 1) for row in rows for edge in ("p10_ms", "p90_ms"))


def sizes_table(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result in results:
        steps = by_setting([result])
        cells = [f"{steps[1, 'none']['standard']['ms_per_token']:.2f}"]
        for link in ("24us", "64us"):
            ladder = steps[1, link]["ladder"]
            cells += [f"{ladder['ms_per_token']:.2f}", f"**{ladder['over_standard']:.2f}x**"]
        rows.append([result["model"], *cells])
    return table(
        ["model", "no link: standard, ms", "24us: ladder, ms", "over standard", "64us: ladder, ms", "over standard"], rows
    )


def prompts_table(prompts: Sequence[Mapping[str, Any]], whole: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for what, results, field, unit in (("prompt", prompts, "ms", "ms"), ("generation", whole, "seconds", "s")):
        for (batch, link), wirings in by_setting(results).items():
            times = [f"{wirings[name][field]:.{1 if unit == 'ms' else 2}f} {unit}" for name in ("standard", "ladder")]
            rows.append([what, batch, link, *times, f"**{wirings['ladder']['over_standard']:.2f}x**"])
    return table(["what", "batch", "link", "standard", "ladder", "ladder"], rows)


def peers_table(one_gpu: Mapping[str, Any], beside: Sequence[Mapping[str, Any]]) -> str:
    ours = one_gpu["rows"][0]
    rows = [
        ["Llama-3.1-8B, one GPU", 1, "none", row["engine"], f"{row['ms_per_token']:.2f} ms", _times(row, ours)]
        for row in one_gpu["rows"]
    ]
    names = {"decode": "70B decode", "prefill": "70B prompt", "e2e": "70B generation"}
    for result in beside:
        for peer in result["peers"]:
            rows.append(
                [
                    f"{names[result['benchmark']]}, emulated",
                    peer["batch"],
                    peer["link"],
                    peer["engine"],
                    f"{peer.get('ms_per_token', peer.get('ms')):.2f} ms",
                    f"{peer['over_ours']:.2f}",
                ]
            )
    return table(["what", "batch", "link", "engine", "time", "over ours (standard)"], rows)


def _times(row: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return f"{row['ms_per_token'] / ours['ms_per_token']:.2f}"


def tokens_table(compared: Mapping[str, Mapping[str, Any]]) -> str:
    """Equal tokens of all wirings together, by dtype."""
    rows = []
    for name, result in compared.items():
        cells = []
        for dtype in ("float32", "float16", "bfloat16"):
            found = [row for row in result["rows"] if row["wiring"].endswith(f", {dtype}")]
            tokens = sum(row["tokens"] for row in found)
            cells.append(f"{sum(row['equal_tokens'] for row in found)} of {tokens}" if tokens else None)
        rows.append([name, *cells])
    return table(["transformers' SDPA attention against", "float32", "float16", "bfloat16"], rows)
