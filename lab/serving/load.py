"""Time per token through vLLM's own server and its own benchmark client, wiring against wiring.

    python -m lab.serving.load                             # two ranks over a link as slow as one module, a random model
    python -m lab.serving.load --model DIR --link 0           # a checkpoint, ranks on one host
    python -m lab.serving.load --url http://host:8000           # a server that runs already

All servers run at once and are measured in turn, so that a busy machine slows all of them alike; only one works at a time.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.hosts.delayed_link import DelayedLink
from lab.output import finish
from lab.serving.servers import VLLM, Server, checkpoints, environment_with_vllm, started
from ladder_residual.cli.options import split_wirings
from ladder_residual.common.markdown import table
from ladder_residual.common.units import read_seconds
from ladder_residual.distributed.launch import run_command

IDLE_SECONDS = 2.5  # vLLM's ranks spin for a second after their last step; the next server must not pay for that
METRICS = {"ttft_ms": "median_ttft_ms", "tpot_ms": "median_tpot_ms", "tokens_per_s": "output_throughput"}
ONE = "one"  # in place of a rate: the next request when the last is answered
BOUND = "no-comm"  # the wiring that never reduces


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a client asks for in one round."""

    name: str
    rate: float  # requests per second; inf: all at once
    prompts: int = 6
    prompt_tokens: int = 16
    new_tokens: int = 48
    concurrency: int = 8


def measure(server: Server, load: Load, scratch: Path) -> dict[str, float]:
    """One run of vLLM's benchmark client."""
    out = scratch / "client.json"
    out.unlink(missing_ok=True)
    command = [*server.enter, *VLLM, "bench", "serve", "--backend", "openai", "--base-url", server.url, "--model", server.model]
    command += ["--tokenizer", server.tokenizer or server.model, "--dataset-name", "random", "--ignore-eos", "--disable-tqdm"]
    command += f"--random-input-len {load.prompt_tokens} --random-output-len {load.new_tokens} --temperature 0".split()
    command += f"--num-prompts {load.prompts} --max-concurrency {load.concurrency} --request-rate {load.rate}".split()
    command += ["--save-result", "--result-dir", str(scratch), "--result-filename", out.name]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not out.exists():
        raise ValueError(f"vLLM's benchmark client failed:\n{(done.stdout + done.stderr)[-2000:]}")
    result = json.loads(out.read_text())
    if result.get("completed") != load.prompts:
        raise ValueError(f"only {result.get('completed')} of {load.prompts} requests to {server.url} were answered")
    return {name: float(result[key]) for name, key in METRICS.items()}


def run(servers: list[Server], loads: list[Load], rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every server under every load, ``rounds`` times, in turn. One row each: medians and the spread over rounds."""
    samples: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for server in servers:
            measure(server, Load(name=ONE, rate=math.inf, prompts=2), Path(scratch))  # the first steps of a server are slow
        for number in range(rounds):
            for load in loads:
                for server in servers:
                    time.sleep(IDLE_SECONDS)
                    sample = measure(server, load, Path(scratch))
                    samples.setdefault((server.wiring, load.name), []).append(sample)
                    which = f"round {number + 1}/{rounds}  {server.wiring:12} {load.name:>5} requests/s"
                    say(f"{which}: {sample['tpot_ms']:.1f} ms/token")
    return summarise(samples, servers[0].wiring)


def summarise(samples: dict[tuple[str, str], list[dict[str, float]]], baseline: str) -> list[dict[str, Any]]:
    """A row per wiring and load. ``speedup`` is the baseline's time per token over the wiring's; ``round_speedups`` is the same
    within each round, whose measurements saw the same machine; ``hidden`` is the share of the baseline's waiting that is gone."""
    medians = {key: statistics.median(sample["tpot_ms"] for sample in found) for key, found in samples.items()}
    rows = []
    for (wiring, load), found in samples.items():
        row: dict[str, Any] = {"wiring": wiring, "rate": load}
        for name in METRICS:
            values = sorted(sample[name] for sample in found)
            row |= {name: statistics.median(values), f"{name}_min": values[0], f"{name}_max": values[-1]}
        row["speedup"] = medians[baseline, load] / medians[wiring, load]
        first = samples[baseline, load]
        row["round_speedups"] = [base["tpot_ms"] / own["tpot_ms"] for base, own in zip(first, found, strict=True)]
        if (BOUND, load) in medians:
            waiting = medians[baseline, load] - medians[BOUND, load]
            row["hidden"] = (medians[baseline, load] - medians[wiring, load]) / waiting if waiting > 0 else None
        rows.append(row)
    return rows


def one_module(
    folder: Path, model: str | None, layers: int, hidden: int, options: dict[str, Any], say: Callable[[str], None]
) -> float:
    """Seconds: a step of one sequence without any all-reduce, on ranks of one host, divided by the number of its modules."""
    from ladder_residual.models.checkpoint_reader import read_json

    directory, overrides = checkpoints(folder, model, [BOUND], layers, hidden)[BOUND]
    modules = 2 * read_json(directory / "config.json")["num_hidden_layers"]
    say("starting vLLM without all-reduces, to time one module")
    one = Load(name=ONE, rate=math.inf, prompts=3, concurrency=1)
    with started(directory, f"{BOUND}-one-host", overrides=overrides, **options) as server:
        measure(server, one, folder)
        found = statistics.median(measure(server, one, folder)["tpot_ms"] for _ in range(3))
    say(f"one module takes {found / modules:.2f} ms (a step of {found:.1f} ms, {modules} modules)")
    return found / modules / 1e3


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def load(
    model: Annotated[str | None, typer.Option(help="Checkpoint directory; default: a Llama with random weights.")] = None,
    wirings: Annotated[
        str, typer.Option(help="The first is the baseline; 'vllm' is vLLM's own model.")
    ] = "standard,ladder,no-comm",
    link: Annotated[
        str, typer.Option(help="Latency between two ranks, one way (needs root): e.g. 1ms; auto: one module's time; 0: none.")
    ] = "auto",
    rates: Annotated[
        str, typer.Option(help="Requests per second with commas between; one: one after the other; inf: all at once.")
    ] = "one,0.5,inf",
    rounds: Annotated[int, typer.Option(help="Rounds; in each, every server is measured at every rate.")] = 3,
    prompts: Annotated[int, typer.Option(help="Requests of one measurement.")] = 6,
    prompt_tokens: Annotated[int, typer.Option()] = 16,
    new_tokens: Annotated[int, typer.Option()] = 48,
    concurrency: Annotated[int, typer.Option(help="Most requests in flight.")] = 8,
    tp: Annotated[int, typer.Option(help="Ranks; with a link, 2.")] = 2,
    layers: Annotated[int, typer.Option(help="Layers of the random model.")] = 12,
    hidden: Annotated[int, typer.Option(help="Hidden size of the random model, a multiple of 128.")] = 1024,
    eager: Annotated[bool, typer.Option("--eager/--compiled", help="vLLM's --enforce-eager.")] = False,
    url: Annotated[str | None, typer.Option(help="Measure the server at this address instead of starting any.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Where the servers' logs go.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON result here too.")] = None,
) -> None:
    """Time per token through vLLM's server, wiring against wiring, over a link of chosen latency."""
    if tp < 1 or rounds < 1 or prompts < 1:
        raise ValueError(f"--tp, --rounds and --prompts must be at least 1, got {tp}, {rounds} and {prompts}")
    seconds = read_seconds(link)
    if tp == 1 and seconds is None:
        seconds = 0.0  # nobody to talk to
    if seconds != 0 and tp != 2 and url is None:
        raise ValueError(f"a delayed link joins two ranks: use --tp 2 (got {tp}), or --link 0")
    sizes = {"prompts": prompts, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "concurrency": concurrency}
    loads = [_load(text.strip(), sizes) for text in rates.split(",")]
    about: dict[str, Any] = {"benchmark": "serve", "tp": tp, **sizes, "rounds": rounds}

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with ExitStack() as stack:
        if url is not None:
            servers = [_running(url, model)]
            about |= {"link": "as it is", "model": servers[0].model}
        else:
            names = split_wirings(wirings)
            if len(set(names)) != len(names):
                raise ValueError(f"--wirings {wirings!r}: name each wiring once")
            log_folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ladder-serve-logs-")))
            log_folder.mkdir(parents=True, exist_ok=True)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ladder-serve-")))
            options: dict[str, Any] = {"tp": tp, "eager": eager, "logs": log_folder, "max_len": prompt_tokens + new_tokens + 64}
            if seconds is None:
                seconds = one_module(folder / "timing", model, layers, hidden, options, say)
                about["module_ms"] = 1e3 * seconds
            wire = stack.enter_context(DelayedLink(seconds)) if seconds else None
            servers = []
            for name, (directory, overrides) in checkpoints(folder, model, names, layers, hidden).items():
                say(f"starting vLLM: {name}")
                servers.append(stack.enter_context(started(directory, name, overrides=overrides, link=wire, **options)))
            about |= {"link": f"{1e3 * seconds:.2f} ms one way" if seconds else "one host", "link_ms": 1e3 * seconds}
            about |= {"model": model or f"random Llama, {layers} layers of {hidden}", "eager": eager}
        result = about | {"rows": run(servers, loads, rounds, say), **environment_with_vllm()}
    _print(result)
    finish(result, out)


def _running(url: str, model: str | None) -> Server:
    url = url.rstrip("/")
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            card = json.load(answer)["data"][0]
    except (urllib.error.URLError, OSError, KeyError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"no OpenAI-style server answers at {url}: {error}") from error
    return Server("server", url, card["id"], [], tokenizer=model or card.get("root") or card["id"])


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("wiring", "requests/s", "TTFT ms", "ms/token", "min-max", "tokens/s", "speed-up", "hidden")
    drawn = Table(*columns, title=f"vLLM, {result['link']}")
    for row in result["rows"]:
        per_token = (f"{row['tpot_ms']:.1f}", f"{row['tpot_ms_min']:.1f}-{row['tpot_ms_max']:.1f}")
        hidden = row.get("hidden")
        tail = (f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}x", "" if hidden is None else f"{100 * hidden:.0f} %")
        drawn.add_row(row["wiring"], row["rate"], f"{row['ttft_ms']:.0f}", *per_token, *tail)
    Console(width=110).print(drawn)
    if "module_ms" in result:
        print(f"one module computes {result['module_ms']:.2f} ms; the link holds each packet for {result['link_ms']:.2f} ms")


def markdown_table(result: dict[str, Any]) -> str:
    """The result as a table."""
    names = {ONE: "one at a time", "inf": f"{result['prompts']} at once"}
    own = {"vllm": "vLLM's own model and all-reduce"}
    rows = []
    for rate in dict.fromkeys(row["rate"] for row in result["rows"]):
        for row in (row for row in result["rows"] if row["rate"] == rate):
            spread = f"{row['tpot_ms_min']:.1f} to {row['tpot_ms_max']:.1f}"
            times = (
                f"{row['ttft_ms']:.0f}",
                f"{row['tpot_ms']:.1f}",
                spread,
                f"{row['tokens_per_s']:.1f}",
                f"{row['speedup']:.2f}x",
            )
            rows.append((names.get(rate, rate), own.get(row["wiring"], row["wiring"]), *times))
    return table(("requests/s", "wiring", "TTFT ms", "ms per token", "min to max", "tokens/s", "speed-up"), rows)


def _load(text: str, sizes: dict[str, int]) -> Load:
    if text == ONE:
        return Load(name=ONE, rate=math.inf, **(sizes | {"concurrency": 1}))
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ValueError(f"a rate is a positive number of requests per second, one or inf; got {text!r}")
    return Load(name=f"{rate:g}", rate=rate, **sizes)


if __name__ == "__main__":
    run_command(app)
