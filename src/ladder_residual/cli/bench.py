"""``ladder bench ...``: parse, call, print. torch is imported inside."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.checks import PHASES, check_name, check_repeats, warnings_of
from ..common.files import check_can_write
from ..common.units import read_seconds
from ..distributed import shared_gpu
from ..distributed.launch import launched, on_ranks
from ..engine import NO_KV_CACHE_DTYPE, RANDOM_WEIGHTS
from ..links import parse_link
from ..models.preflight import check_model
from .options import (
    Device,
    Dtype,
    KVCacheDtype,
    Layers,
    Links,
    MeasuredRanks,
    Repeats,
    Schedule,
    Shape,
    ShareGpu,
    Wirings,
    at_least_one,
    expanded,
    one_of,
    split_links,
    split_wirings,
    whole_numbers,
)

app = typer.Typer(help="Measure. In a file or pipe the last line is the whole result as JSON.", no_args_is_help=True)

Prompt = Annotated[int, typer.Option(help="Tokens of the prompt.")]
New = Annotated[int, typer.Option(help="Tokens generated.")]


@dataclass(frozen=True, kw_only=True)
class Cases:
    """What decode, prefill and e2e have in common."""

    model: Shape = "llama-3-70b"
    layers: Layers = None
    tp: MeasuredRanks = 8
    batch: Annotated[str, typer.Option(help="Sequences decoded together, several sizes with commas between.")] = "1"
    kv_cache_dtype: KVCacheDtype = "auto"
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            help="On GPUs: emulated (rank 0 alone, all-reduces as --links says), real (over --reducers), or auto: real where ranks were "
            "started or share a GPU.",
            **one_of("auto", "real", "emulated"),
        ),
    ] = "auto"
    reducers: Annotated[str, typer.Option(help="Of real ranks on GPUs, comma-separated: symm (symmetric memory), nccl.")] = (
        "symm,nccl"
    )
    share_gpu: ShareGpu = False
    device: Device = "auto"
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON line alone.")] = False


@app.command("overlap")
def bench_overlap(
    model: Shape = "ladder-1b",
    layers: Layers = None,
    wirings: Wirings = "standard,ladder",
    tp: MeasuredRanks = 2,
    latency: Annotated[
        str, typer.Option(help="Emulated latency of an all-reduce: e.g. 500us, 2ms, 0, or auto (one module's time).")
    ] = "auto",
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of context.")] = 16,
    repeats: Repeats = 30,
    phase: Annotated[str, typer.Option(help="decode, prefill or e2e.", **one_of(*PHASES))] = "decode",
    dtype: Dtype = "float32",
    device: Device = "auto",
) -> None:
    """How much of a slow link each wiring hides: decode steps on real ranks, all wirings in one run."""
    seconds = read_seconds(latency)
    names = split_wirings(wirings)
    at_least_one(tp=tp, batch=batch, prompt=prompt)
    check_repeats(repeats)
    check_model(model, layers=layers, wirings=names, tp=tp)
    on_ranks(tp)
    from ..bench.overlap import run
    from ..distributed.world import distributed

    with distributed(device) as world:
        asked: dict[str, Any] = {"batch": batch, "prompt": prompt, "repeats": repeats, "dtype": dtype, "phase": phase}
        result = run(world, source=model, layers=layers, wirings=names, latency=seconds, **asked)
        if world.is_main:
            _print_overlap(result)
            print_json(result)


@app.command("decode")
@expanded
def bench_decode(
    cases: Cases,
    *,
    prompt: Prompt = 1024,
    new: New = 512,
    context: Annotated[
        int | None, typer.Option(help="Tokens in the cache; default: the prompt and half of the new ones.")
    ] = None,
    wirings: Wirings = "standard,ladder,parallel,desync-2x,no-comm",
    links: Links = "none;24us",
    schedule: Schedule = "auto",
    gemm_backend: Annotated[
        str, typer.Option(help="GEMMs of batches 2 to 16 in the CUDA engine: cublas, triton or auto (the faster, measured).")
    ] = "auto",
    weights: Annotated[
        str,
        typer.Option(
            help=f"Format of the random weights in the CUDA engine: {', '.join(RANDOM_WEIGHTS)}.", **one_of(*RANDOM_WEIGHTS)
        ),
    ] = "bf16",
    repeats: Repeats = 40,
) -> None:
    """Decode steps. On GPUs: the CUDA engine on real ranks, or rank 0 of TP alone (emulated). On CPUs: real ranks."""
    context = context or prompt + new // 2
    at_least_one(context=context)
    engine = {"context": context, "schedule": schedule, "gemm_backend": gemm_backend, "weights": weights}
    if (schedule, gemm_backend, weights) != ("auto", "auto", "bf16") and not _on_gpu(cases.device):
        raise ValueError("--schedule, --gemm-backend and --weights are the CUDA engine's: ranks on CPUs have none of them")
    _measure("decode", cases, wirings, links, repeats, on_gpu=engine, on_cpu={"prompt": context})


@app.command("prefill")
@expanded
def bench_prefill(
    cases: Cases,
    *,
    prompt: Prompt = 1024,
    wirings: Wirings = "standard,ladder",
    links: Links = "none;500us",
    repeats: Repeats = 5,
) -> None:
    """Time to the first token. On GPUs: the CUDA engine on real ranks, or rank 0 of TP alone (emulated). On CPUs: real ranks."""
    sizes = {"prompt": prompt}
    _measure("prefill", cases, wirings, links, repeats, on_gpu=sizes, on_cpu=sizes)


@app.command("e2e")
@expanded
def bench_e2e(
    cases: Cases,
    *,
    prompt: Prompt = 1024,
    new: New = 512,
    wirings: Wirings = "standard,ladder",
    links: Links = "24us",
    repeats: Repeats = 5,
) -> None:
    """Prompt to last token, the paper's measure. On GPUs: real ranks, or rank 0 of TP. On CPUs: real ranks."""
    sizes = {"prompt": prompt, "new": new}
    _measure("e2e", cases, wirings, links, repeats, on_gpu=sizes, on_cpu=sizes)


@app.command("train")
def bench_train(
    model: Shape = "ladder-1b",
    layers: Layers = None,
    tp: MeasuredRanks = 2,
    share_gpu: ShareGpu = False,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens of a row.")] = 256,
    vocabulary: Annotated[
        int | None, typer.Option(help="Size of the vocabulary, if not the shape's: the head costs the same under every wiring.")
    ] = None,
    wirings: Wirings = "standard,ladder",
    links: Annotated[
        str | None,
        typer.Option(
            help="On CPU ranks latencies (none, 2ms), for one rank on a GPU emulated links (500us, h200-nccl); several with ';'. "
            "Ranks on GPUs reduce over their own link.",
            show_default="2ms",
        ),
    ] = None,
    repeats: Repeats = 10,
    dtype: Dtype = "float32",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the layers' modules.")] = False,
    device: Device = "auto",
) -> None:
    """Training steps, forward and backward: real ranks on CPUs or GPUs, or one rank of --tp on a GPU with emulated links."""
    names = split_wirings(wirings)
    shared_gpu.share_gpu(share_gpu)
    real = shared_gpu.is_shared() or launched() > 1
    parts = split_links(links or ("none" if real and _on_gpu(device) else "2ms"))
    at_least_one(tp=tp, batch=batch, sequence=sequence, vocabulary=vocabulary)
    check_model(model, layers=layers, wirings=names, tp=tp)
    if real or not _on_gpu(device):
        on_ranks(tp)
    from ..bench.train import bench_train as run
    from ..distributed.world import distributed

    shape: dict[str, Any] = {"model": model, "layers": layers, "tp": tp or 1, "batch": batch, "sequence": sequence}
    shape["vocabulary"] = vocabulary
    with distributed(device) as world:
        result = run(world, **shape, wirings=names, links=parts, repeats=repeats, dtype=dtype, compiled=compiled)
        _print_result(result if world.is_main else None)


@app.command("calibrate")
def bench_calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", help="The TOML file to write, for `ladder plan --hardware`.")],
    tp: Annotated[
        int | None, typer.Option("--tp", help="Ranks that measure together; from 2 on their link is measured too.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the device and of the link in the file.")] = "here",
    dtype: Annotated[
        str, typer.Option(help="auto (float32 on a CPU, bfloat16 on CUDA), float32, bfloat16 or float16.")
    ] = "auto",
    device: Device = "auto",
) -> None:
    """Measure this host and write it as a device and a link of `ladder plan`."""
    check_name(name)
    check_can_write(out)
    on_ranks(tp)
    from ..bench.calibrate import calibrate
    from ..distributed.world import distributed

    with distributed(device) as world:
        result = calibrate(world, name=name, dtype=dtype)
        if not world.is_main:
            return
        text = result.pop("toml")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text)
        except OSError as error:
            raise ValueError(f"cannot write {out}: {error.strerror}") from error
        print(text)
        for row in result["checks"]:
            print(
                f"check: a {row['wiring']} step of {result['step_model']}, batch {row['batch']}: measured {row['measured_ms']:.2f} ms, "
                f"planned {row['planned_ms']:.2f} ms ({row['error_percent']:+.0f} %)"
            )
        link = f" --link {name}" if world.size > 1 else ""
        print(f"wrote {out}; use it: ladder plan --model llama-3.1-8b --hardware {out} --device {name}{link} --tp {world.size}")
        print_json(result)


@app.command("link")
def bench_link(tp: MeasuredRanks = 2, device: Device = "cpu") -> None:
    """Time an all-reduce between CPU ranks each way they can do it: sent directly, sent directly as bfloat16, by gloo."""
    if tp == 1 and launched() == 1:
        raise ValueError("--tp 1 has no link: an all-reduce is timed between 2 or more ranks")
    on_ranks(tp)
    from ..common.environment import environment
    from ..common.markdown import table
    from ..distributed.link_probe import probe_link
    from ..distributed.world import distributed

    with distributed(device) as world:
        found = probe_link(world)
        if world.is_main:
            ways = ("sockets", "sockets_bf16", "gloo")
            rows = [(f"{row.bytes:,}", *(f"{1e3 * getattr(row, way):.2f}" for way in ways)) for row in found.rows]
            print(table(("bytes", "sockets, ms", "sockets as bfloat16, ms", "gloo, ms"), rows))
            print(f"--small-allreduce measured uses sockets up to {found.small_allreduce_bytes:,} bytes on this link")
            print_json({"benchmark": "link", "tp": world.size, **found.to_dict(), **environment()})


def _on_gpu(device: str) -> bool:
    if device == "cpu":
        return False
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    if shared_gpu.is_shared() and not torch.cuda.is_available():
        raise ValueError(shared_gpu.NO_GPU)
    return torch.cuda.is_available()


def _kv_cache(kv_cache_dtype: str, device: str) -> dict[str, Any]:
    if kv_cache_dtype != "auto" and not _on_gpu(device):
        raise ValueError(NO_KV_CACHE_DTYPE.format(kv_cache_dtype))
    return {"kv_cache_dtype": kv_cache_dtype}


def _measure(
    phase: str, cases: Cases, wirings: str, links: str, repeats: int, *, on_gpu: dict[str, Any], on_cpu: dict[str, Any]
) -> None:
    """One phase: real ranks on GPUs, rank 0 of ``tp`` on a GPU, or real ranks on CPUs."""
    on_gpu = on_gpu | _kv_cache(cases.kv_cache_dtype, cases.device)
    batches = whole_numbers(cases.batch, "batch")
    asked: dict[str, Any] = {"layers": cases.layers, "wirings": split_wirings(wirings), "repeats": repeats}
    at_least_one(layers=cases.layers, repeats=repeats, **on_cpu)
    named = split_links(links)
    for link in named:
        _check_link(link)
    shared_gpu.share_gpu(cases.share_gpu)
    real = cases.ranks == "real" or (cases.ranks == "auto" and (shared_gpu.is_shared() or launched() > 1))
    if real and _on_gpu(cases.device):
        names = [name.strip() for name in cases.reducers.split(",")]
        on_ranks(cases.tp)
        from ..bench.real_ranks import bench_ranks
        from ..distributed.world import distributed

        with distributed("cuda") as world:
            result = bench_ranks(phase, world, model=cases.model, batches=batches, reducers=names, **asked, **on_gpu)
            _print_result(result if world.is_main else None, cases.as_json)
        return
    if _on_gpu(cases.device):
        from ..bench import engine

        run: Any = {"decode": engine.bench_decode, "prefill": engine.bench_prefill, "e2e": engine.bench_e2e}[phase]
        _print_result(run(model=cases.model, tp=cases.tp or 1, batches=batches, links=named, **asked, **on_gpu), cases.as_json)
        return
    latencies = [_latency(link) for link in named]
    if cases.tp == 1:
        raise ValueError(f"bench {phase} on CPUs measures how all-reduces are hidden: use --tp 2 or more")
    check_model(cases.model, layers=cases.layers, wirings=asked["wirings"], tp=cases.tp)
    on_ranks(cases.tp)
    from ..bench.overlap import run_cases
    from ..distributed.world import distributed

    with distributed("cpu") as world:
        result = run_cases(world, source=cases.model, phase=phase, batches=batches, latencies=latencies, **asked, **on_cpu)
        _print_result(result if world.is_main else None, cases.as_json)


def _check_link(link: str) -> None:
    """Of no use on any device: said before torch looks for a GPU."""
    try:
        read_seconds(link)
    except ValueError:
        parse_link(link)


def _latency(link: str) -> float | None:
    try:
        return read_seconds(link)
    except ValueError as error:
        raise ValueError(f"{error}; ranks on CPUs take latencies, measured tables and alpha,beta need a GPU") from None


def _print_result(result: dict[str, Any] | None, as_json: bool = False) -> None:
    """A table of the rows, then everything as one JSON line (``as_json``: that alone)."""
    if result is None:
        return
    if not as_json:
        from rich.console import Console
        from rich.table import Table

        title = " ".join(str(result[key]) for key in ("benchmark", "model") if key in result) + f", tp {result.get('tp', 1)}"
        title += " (emulated)" if result.get("emulated") else ""
        title += f" ({result['ranks_per_gpu']} ranks share one GPU)" if result.get("ranks_per_gpu", 1) > 1 else ""
        rows = result["rows"]
        columns = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], dict)))
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*[_cell(row.get(column)) for column in columns])
        Console(width=160).print(table)
        for line in warnings_of(result):
            print(f"warning: {line}", file=sys.stderr)
    print_json(result, as_json)


def print_json(result: dict[str, Any], asked: bool = False) -> None:
    """The last line, for programs: a terminal has the table, and gets these thousands of characters only if ``asked``."""
    if asked or not sys.stdout.isatty():
        print(json.dumps(result))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _print_overlap(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("wiring", "ms/step", "p25-p75", "tokens/s", "speed-up", "step / bound", "hidden", title=result["link"])
    for row in result["rows"]:
        hidden = row["hidden_percent"]
        table.add_row(
            row["wiring"],
            f"{row['median_ms']:.2f}",
            f"{row['p25_ms']:.2f}-{row['p75_ms']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['over_bound']:.2f}",
            "" if hidden is None else f"{hidden:.0f} %",
        )
    Console(width=110).print(table)
    print(
        f"tp {result['tp']}, batch {result['batch']}: compute {result['compute_ms']:.2f} ms, "
        f"communication {result['communication_ms']:.2f} ms, bound {result['bound_ms']:.2f} ms a step"
    )
