"""``ladder bench ...``: parse, call, print. The last line printed is the whole result as JSON; torch is imported inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..launch import on_ranks

bench = typer.Typer(help="Measure. The last line printed is the whole result as JSON.", no_args_is_help=True)

Ranks = Annotated[int | None, typer.Option("--tp", help="Tensor-parallel ranks; starts them unless torchrun has.")]
Uneven = Annotated[bool, typer.Option("--uneven", help="Allow ranks with unequal numbers of heads.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")]
Shape = Annotated[
    str,
    typer.Option(
        "--model", help="Published shape (random weights) or checkpoint directory (on a GPU its shape, with random weights)."
    ),
]
Layers = Annotated[int | None, typer.Option(help="Use only so many layers of the shape.")]
Wirings = Annotated[str, typer.Option(help="Comma-separated, e.g. standard,ladder:last-half,ladder.")]
Links = Annotated[
    str,
    typer.Option(
        help="Emulated all-reduce: none, 24us, 24us+launch, h200-nccl, 'alpha=12,beta=90'; separate several with ';'."
    ),
]
Repeats = Annotated[int, typer.Option(help="Measured runs per case.")]
Batches = Annotated[str, typer.Option(help="Comma-separated.")]
Prompt = Annotated[int, typer.Option(help="Tokens of the prompt.")]
New = Annotated[int, typer.Option(help="Tokens generated.")]
WithPeers = Annotated[
    bool, typer.Option("--peers/--no-peers", help="On a GPU: beside it what a user would have otherwise, compiled.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the JSON line alone.")]


@bench.command("overlap")
def bench_overlap(
    model: Shape = "ladder-1b",
    layers: Layers = None,
    wirings: Wirings = "standard,ladder",
    tp: Ranks = 2,
    latency: Annotated[
        str, typer.Option(help="Emulated latency of a sum: e.g. 500us, 2ms, 0, or auto (one module's time).")
    ] = "auto",
    batch: Annotated[int, typer.Option()] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of context.")] = 16,
    repeats: Repeats = 30,
    phase: Annotated[str, typer.Option(help="decode or prefill.")] = "decode",
    dtype: Dtype = "float32",
    device: Device = "auto",
) -> None:
    """How much of a slow link each wiring hides: decode steps on real ranks, all wirings in one run."""
    seconds = read_seconds(latency)
    names = split_wirings(wirings)
    on_ranks(tp)
    from ..parallel import distributed
    from .overlap import run

    with distributed(device) as world:
        result = run(
            world,
            source=model,
            layers=layers,
            wirings=names,
            latency=seconds,
            batch=batch,
            prompt=prompt,
            repeats=repeats,
            dtype=dtype,
            phase=phase,
        )
        if world.is_main:
            _print_overlap(result)
            print(json.dumps(result))


@bench.command("decode")
def bench_decode(
    model: Shape = "llama-3-70b",
    layers: Layers = None,
    tp: Ranks = 8,
    batch: Batches = "1",
    prompt: Prompt = 1024,
    new: New = 512,
    context: Annotated[
        int | None, typer.Option(help="Tokens in the cache; default: the prompt and half of the new ones.")
    ] = None,
    wirings: Wirings = "standard,ladder,parallel,desync-2x,no-comm",
    links: Links = "none;24us",
    schedule: Annotated[
        str, typer.Option(help="one, two (lanes, of ladder), woven (ladder, parallel), or auto (measured).")
    ] = "auto",
    products: Annotated[
        str, typer.Option(help="Of batches 2 to 16 on a GPU: cublas, triton (our own kernels) or auto (measured).")
    ] = "auto",
    repeats: Repeats = 40,
    peers: WithPeers = True,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Decode steps. On a GPU: rank 0 of TP (emulated when tp > 1) on the CUDA engine; on CPU: real ranks."""
    asked = {"model": model, "layers": layers, "wirings": split_wirings(wirings), "repeats": repeats}
    context = context or prompt + new // 2
    on_gpu = {"context": context, "schedule": schedule, "products": products, "peers": peers}
    if not _on_gpu(device) and (schedule, products) != ("auto", "auto"):
        raise ValueError("--schedule and --products are the CUDA engine's: ranks on CPUs have neither")
    on_cpu = {"prompt": context}
    _measure("decode", asked, tp=tp, batch=batch, links=links, device=device, as_json=as_json, on_gpu=on_gpu, on_cpu=on_cpu)


@bench.command("prefill")
def bench_prefill(
    model: Shape = "llama-3-70b",
    layers: Layers = None,
    tp: Ranks = 8,
    batch: Batches = "1",
    prompt: Prompt = 1024,
    wirings: Wirings = "standard,ladder",
    links: Links = "none;500us",
    repeats: Repeats = 5,
    peers: WithPeers = True,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time to the first token. On a GPU: rank 0 of TP (emulated when tp > 1) on the CUDA engine; on CPU: real ranks."""
    asked = {"model": model, "layers": layers, "wirings": split_wirings(wirings), "repeats": repeats, "prompt": prompt}
    _measure("prefill", asked, tp=tp, batch=batch, links=links, device=device, as_json=as_json, on_gpu={"peers": peers})


@bench.command("e2e")
def bench_e2e(
    model: Shape = "llama-3-70b",
    layers: Layers = None,
    tp: Ranks = 8,
    batch: Batches = "1",
    prompt: Prompt = 1024,
    new: New = 512,
    wirings: Wirings = "standard,ladder",
    links: Links = "24us",
    repeats: Repeats = 5,
    peers: WithPeers = True,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Prompt to last token, the paper's measure. On a GPU: rank 0 of TP (emulated when tp > 1); on CPU: real ranks."""
    asked = {
        "model": model,
        "layers": layers,
        "wirings": split_wirings(wirings),
        "repeats": repeats,
        "prompt": prompt,
        "new": new,
    }
    _measure("e2e", asked, tp=tp, batch=batch, links=links, device=device, as_json=as_json, on_gpu={"peers": peers})


@bench.command("train")
def bench_train(
    model: Shape = "ladder-1b",
    layers: Layers = None,
    tp: Ranks = 2,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens of a row.")] = 256,
    vocabulary: Annotated[
        int | None, typer.Option(help="Another vocabulary than the shape's: the head costs the same under every wiring.")
    ] = None,
    wirings: Wirings = "standard,ladder",
    links: Annotated[
        str,
        typer.Option(help="On CPU ranks latencies (none, 2ms), on a GPU emulated links (500us, h200-nccl); several with ';'."),
    ] = "2ms",
    repeats: Repeats = 10,
    dtype: Dtype = "float32",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the layers' modules.")] = False,
    wire: Annotated[
        str | None, typer.Option(help="Two hosts on this machine with a real wire instead, e.g. 1ms or 1ms/1gbit (needs root).")
    ] = None,
    device: Device = "auto",
) -> None:
    """Training steps, forward and backward: real ranks on CPUs, one emulated rank of --tp on a GPU."""
    names, parts = split_wirings(wirings), _split_links(links)
    if wire is not None:
        from .train import bench_train_on_hosts

        arguments = ["--model", model, "--batch", str(batch), "--sequence", str(sequence), "--wirings", ",".join(names)]
        arguments += ["--links", "none", "--repeats", str(repeats), "--dtype", dtype, "--device", "cpu"]
        arguments += [*(["--layers", str(layers)] if layers else []), *(["--compile"] if compiled else [])]
        arguments += ["--vocabulary", str(vocabulary)] if vocabulary else []
        _print_result(bench_train_on_hosts(wire, arguments))
        return
    if not _on_gpu(device):
        on_ranks(tp)
    from ..parallel import distributed
    from .train import bench_train as run

    shape: dict[str, Any] = {"model": model, "layers": layers, "tp": tp or 1, "batch": batch, "sequence": sequence}
    shape["vocabulary"] = vocabulary
    with distributed(device) as world:
        result = run(world, **shape, wirings=names, links=parts, repeats=repeats, dtype=dtype, compiled=compiled)
        _print_result(result if world.is_main else None)


@bench.command("peers")
def bench_peers(
    model: Shape = "llama-3.1-8b",
    layers: Layers = None,
    context: Annotated[int, typer.Option()] = 1100,
    repeats: Repeats = 40,
) -> None:
    """One GPU, whole model, batch 1: the CUDA engine beside what a user would have otherwise, in one run."""
    _need_gpu("peers")
    from .gpu_peers import bench_peers as run

    _print_result(run(model=model, context=context, repeats=repeats, layers=layers))


def _on_gpu(device: str) -> bool:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; choose auto, cpu or cuda")
    if device == "cpu":
        return False
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    return torch.cuda.is_available()


def _need_gpu(name: str) -> None:
    if not _on_gpu("auto"):
        raise ValueError(
            f"bench {name} measures the CUDA engine and torch sees no CUDA device; `ladder bench decode` runs on CPUs"
        )


def _measure(
    phase: str,
    asked: dict[str, Any],
    *,
    tp: int | None,
    batch: str,
    links: str,
    device: str,
    as_json: bool,
    on_gpu: dict[str, Any] | None = None,
    on_cpu: dict[str, Any] | None = None,
) -> None:
    """One phase: rank 0 of ``tp`` on the CUDA engine, or real ranks on CPUs."""
    batches = _whole_numbers(batch, "batch")
    for name, value in {**asked, **(on_gpu or {})}.items():
        if name in ("prompt", "new", "context", "repeats", "layers") and value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if not _on_gpu(device):
        latencies = [0.0 if link in ("none", "0") else _latency(link) for link in _split_links(links)]
        if tp == 1:
            raise ValueError(f"bench {phase} on CPUs measures how sums over ranks are hidden: use --tp 2 or more")
        on_ranks(tp)
        _print_result(_on_cpu_ranks(phase, batches, latencies, **asked, **(on_cpu or {})), as_json)
        return
    from . import gpu

    run: Any = {"decode": gpu.bench_decode, "prefill": gpu.bench_prefill, "e2e": gpu.bench_e2e}[phase]
    _print_result(run(tp=tp or 1, batches=batches, links=_split_links(links), **asked, **(on_gpu or {})), as_json)


def _on_cpu_ranks(
    phase: str, batches: list[int], latencies: Sequence[float | None], *, model: str, **asked: Any
) -> dict[str, Any] | None:
    """The same table from real ranks over this host's link, each emulated latency added to it."""
    from ..parallel import distributed
    from .overlap import run

    with distributed("cpu") as world:
        parts = [
            run(world, source=model, latency=latency, batch=batch, phase=phase, **asked)
            for batch in batches
            for latency in latencies
        ]
        of_case = ("batch", "link", "compute_ms", "communication_ms", "bound_ms")
        rows = [{**{name: part[name] for name in of_case}, **row} for part in parts for row in part["rows"]]
        alike = {name: value for name, value in parts[0].items() if all(part[name] == value for part in parts)}
        return {**alike, "benchmark": phase, "rows": rows} if world.is_main else None


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
        for rows, name in ((result["rows"], title), (result.get("peers", []), "what a user would have otherwise")):
            columns = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], dict)))
            table = Table(*columns, title=name)
            for row in rows:
                table.add_row(*[_cell(row.get(column)) for column in columns])
            if rows:
                Console(width=160).print(table)
        for note in result.get("notes", []):
            print(note)
    print(json.dumps(result))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _whole_numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 10**7 for part in parts):
        raise ValueError(f"--{option} takes whole numbers above 0 with commas between, such as 1,4,16; got {text!r}")
    return [int(part) for part in parts]


def _split_links(text: str) -> list[str]:
    """``;`` separates links always; ``,`` does too where no link has one inside."""
    parts = text.split(";" if ";" in text or "=" in text else ",")
    links = [part.strip() for part in parts]
    if not all(links):
        raise ValueError(f"--links {text!r}: an empty name between separators")
    return links


def split_wirings(text: str) -> list[str]:
    """Commas separate wirings and, inside one, layers: a part that begins with a digit belongs to the wiring before it."""
    names: list[str] = []
    for part in text.split(","):
        if names and part.strip()[:1].isdigit():
            names[-1] += "," + part.strip()
        else:
            names.append(part.strip())
    if not all(names):
        raise ValueError(f"--wirings {text!r}: an empty name between commas")
    return names


def read_seconds(text: str) -> float | None:
    """``500us``, ``2ms``, ``0``; None for ``auto``."""
    if text == "auto":
        return None
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * units.get(unit, 1.0)
    except ValueError:
        raise ValueError(f"cannot read the latency {text!r}; write e.g. 500us, 2ms, 0 or auto") from None
    if not unit and value != 0:
        raise ValueError(f"the latency {text!r} has no unit; write e.g. 500us or 2ms")
    if not 0 <= value <= 60:
        raise ValueError(f"a latency is between 0 and 60 s, got {text}")
    return value


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
