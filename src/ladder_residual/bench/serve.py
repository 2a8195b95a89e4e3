"""Time per token through vLLM's own server and its own benchmark client, wiring against wiring.

    ladder bench serve                                  # two ranks over a link of 1 ms, a random model, standard and ladder
    ladder bench serve --model DIR --link 0             # a checkpoint, ranks on one host
    ladder bench serve --url http://host:8000           # a server that runs already

All servers run at once and are measured in turn, so that a busy machine slows all of them alike; only one works at a time. With a
link, each rank is a vLLM node of its own in its own network namespace, and all that ranks say to each other crosses it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from .delayed_link import DelayedLink

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
VLLM_ITSELF = "vllm"  # in place of a wiring: the plain model, without our plugin
START_SECONDS = 600  # on a busy machine compiling takes minutes
IDLE_SECONDS = 2.5  # vLLM's ranks spin for a second after their last step; the next server must not pay for that
METRICS = {"ttft_ms": "median_ttft_ms", "tpot_ms": "median_tpot_ms", "tokens_per_s": "output_throughput"}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a client asks for in one round."""

    rate: float  # requests per second; inf: all at once
    prompts: int = 6
    prompt_tokens: int = 16
    new_tokens: int = 48
    concurrency: int = 8


@dataclass
class Server:
    wiring: str
    url: str
    model: str
    enter: list[str]  # command prefix that reaches the server
    tokenizer: str | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)  # empty: somebody else's


@contextmanager
def started(
    directory: Path,
    wiring: str,
    *,
    tp: int,
    link: DelayedLink | None = None,
    eager: bool = False,
    logs: Path,
    max_len: int = 256,
    overrides: dict[str, Any] | None = None,
    more: Sequence[str] = (),
) -> Iterator[Server]:
    """A vLLM server over ``directory`` for the duration of the block; its processes are gone afterwards, whatever happened."""
    port = _free_port()
    nodes = 2 if link else 1
    cores = _core_sets(tp)
    arguments = [str(directory), "--tensor-parallel-size", str(tp), "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--max-model-len", str(max_len), "--max-num-seqs", "8", "--dtype", "float32", "--no-enable-log-requests"]
    arguments += ["--enforce-eager"] if eager else []
    arguments += ["--hf-overrides", json.dumps(overrides)] if overrides else []
    arguments += more
    if link:
        arguments += ["--nnodes", "2", "--master-addr", link.addresses[0], "--master-port", str(_free_port())]
        arguments += ["--distributed-executor-backend", "mp"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for node in range(nodes):
            environment = os.environ | {
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "OMP_NUM_THREADS": str(len(cores[0])),
                "VLLM_CPU_OMP_THREADS_BIND": _bind(cores[node]) if link else "|".join(map(_bind, cores)),
            }
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            command = [*VLLM, "serve", *arguments]
            if link:
                environment |= {"VLLM_HOST_IP": link.addresses[node], "GLOO_SOCKET_IFNAME": "link0"}
                command = [*link.enter(node), *command, "--node-rank", str(node), *(["--headless"] if node else [])]
            with (logs / f"{_file_name(wiring)}-{node}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )
        server = Server(wiring, f"http://127.0.0.1:{port}", str(directory), link.enter(0) if link else [], processes=processes)
        _wait_until_up(server, processes, logs / f"{_file_name(wiring)}-0.log")
        yield server
    finally:
        stop(processes)


def stop(processes: list[subprocess.Popen[bytes]], patience: float = 20) -> None:
    """SIGTERM, then SIGKILL, to everything these processes started."""
    for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        for process in processes:
            try:
                os.killpg(process.pid, sign)
            except ProcessLookupError:
                continue
        for process in processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue


def _wait_until_up(server: Server, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    probe = [*server.enter, sys.executable, "-c", _PROBE, f"{server.url}/health"]
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run(probe, check=False).returncode:
        ended = any(process.poll() is not None for process in processes)
        if ended or time.monotonic() > deadline:
            why = "ended" if ended else f"did not answer within {START_SECONDS} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise ValueError(f"the vLLM server of {server.wiring} {why}. The end of its log ({log}):\n{tail}")
        time.sleep(1)


_PROBE = "import sys, urllib.request as u\ntry: u.urlopen(sys.argv[1], timeout=5)\nexcept OSError: sys.exit(1)"


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
    samples: dict[tuple[str, float], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for server in servers:
            measure(server, Load(rate=math.inf, prompts=2), Path(scratch))  # the first steps of a server are slow
        for number in range(rounds):
            for load in loads:
                for server in servers:
                    time.sleep(IDLE_SECONDS)
                    sample = measure(server, load, Path(scratch))
                    samples.setdefault((server.wiring, load.rate), []).append(sample)
                    which = f"round {number + 1}/{rounds}  {server.wiring:12} {load.rate:g} requests/s"
                    say(f"{which}: {sample['tpot_ms']:.1f} ms/token")
    rows = []
    for (wiring, rate), found in samples.items():
        row: dict[str, Any] = {"wiring": wiring, "rate": rate if math.isfinite(rate) else "inf"}
        for name in METRICS:
            values = sorted(sample[name] for sample in found)
            row |= {name: statistics.median(values), f"{name}_min": values[0], f"{name}_max": values[-1]}
        first = samples.get((servers[0].wiring, rate), found)
        row["speedup"] = statistics.median(s["tpot_ms"] for s in first) / row["tpot_ms"]
        rows.append(row)
    return rows


def random_checkpoint(directory: Path, layers: int, hidden: int) -> Path:
    """A Llama with random weights and the demo's tokenizer: for measurements of speed only."""
    import shutil
    from importlib import resources

    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=int(2.75 * hidden) // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        with resources.as_file(resources.files("ladder_residual").joinpath("data", "demo", name)) as file:
            shutil.copyfile(file, directory / name)
    return directory


def serve(
    model: Annotated[str | None, typer.Option(help="Checkpoint directory; default: a Llama with random weights.")] = None,
    wirings: Annotated[str, typer.Option(help="The first is the baseline; 'vllm' is vLLM's own model.")] = "standard,ladder",
    link: Annotated[str, typer.Option(help="Latency between two ranks, one way (needs root); 0: none.")] = "1ms",
    rates: Annotated[str, typer.Option(help="Requests per second, separated by commas; inf: all at once.")] = "0.5,inf",
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
    seconds = _seconds(link)
    if tp < 1 or rounds < 1 or prompts < 1:
        raise ValueError(f"--tp, --rounds and --prompts must be at least 1, got {tp}, {rounds} and {prompts}")
    if seconds and tp != 2 and url is None:
        raise ValueError(f"a delayed link joins two ranks: use --tp 2 (got {tp}), or --link 0")
    sizes = {"prompts": prompts, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "concurrency": concurrency}
    loads = [Load(rate=_rate(text), **sizes) for text in rates.split(",")]
    about: dict[str, Any] = {"benchmark": "serve", "tp": tp, **sizes, "rounds": rounds}

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with ExitStack() as stack:
        if url is not None:
            servers = [_running(url, model)]
            about |= {"link": "as it is", "model": servers[0].model}
        else:
            names = _split(wirings)
            log_folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ladder-serve-logs-")))
            log_folder.mkdir(parents=True, exist_ok=True)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ladder-serve-")))
            directories = checkpoints(folder, model, names, layers, hidden)
            wire = stack.enter_context(DelayedLink(seconds)) if seconds else None
            servers = []
            options: dict[str, Any] = {
                "tp": tp,
                "link": wire,
                "eager": eager,
                "logs": log_folder,
                "max_len": prompt_tokens + new_tokens + 64,
            }
            for name, (directory, overrides) in directories.items():
                say(f"starting vLLM: {name}")
                servers.append(stack.enter_context(started(directory, name, overrides=overrides, **options)))
            about |= {"link": f"{1e3 * seconds:g} ms one way" if seconds else "one host", "link_ms": 1e3 * seconds}
            about |= {"model": model or f"random Llama, {layers} layers of {hidden}", "eager": eager}
        result = about | {"rows": run(servers, loads, rounds, say), **_environment()}
    _print(result)
    text = json.dumps(result)
    if out is not None:
        out.write_text(text + "\n")
    print(text)


def checkpoints(
    folder: Path, model: str | None, names: list[str], layers: int, hidden: int
) -> dict[str, tuple[Path, dict[str, Any] | None]]:
    """For each wiring a directory, sharing one set of weights, and what the server is to override in its config."""
    from ..checkpoint import Checkpoint
    from ..convert import convert
    from ..families import family_of
    from ..hf_config import class_name

    plain = model or str(random_checkpoint(folder / "plain", layers, hidden))
    found: dict[str, tuple[Path, dict[str, Any] | None]] = {}
    for name in names:
        directory = folder / _file_name(name)
        convert(plain, directory, "standard" if name == VLLM_ITSELF else name)
        overrides = None
        if name == "standard":
            # A standard checkpoint is vLLM's own business. Through our layers its sums take the same way as a ladder's, so that
            # the comparison shows the wiring and not the transport.
            family = family_of(Checkpoint(directory).config)
            overrides = {"architectures": [class_name(family.model_type, "ForCausalLM")], "wiring": "standard"}
        found[name] = (directory, overrides)
    return found


def _running(url: str, model: str | None) -> Server:
    url = url.rstrip("/")
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            card = json.load(answer)["data"][0]
    except (urllib.error.URLError, OSError, KeyError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"no OpenAI-style server answers at {url}: {error}") from error
    return Server("server", url, card["id"], [], tokenizer=model or card.get("root") or card["id"])


def _environment() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    from .overlap import environment

    versions = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            versions["vllm"] = version(name)
            break
        except PackageNotFoundError:
            continue
    return environment() | versions | {"machine": f"{os.cpu_count()} cores, {os.uname().machine}"}


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("wiring", "requests/s", "TTFT ms", "ms/token", "min-max", "tokens/s", "speed-up")
    table = Table(*columns, title=f"vLLM, {result['link']}")
    for row in result["rows"]:
        per_token = (f"{row['tpot_ms']:.1f}", f"{row['tpot_ms_min']:.1f}-{row['tpot_ms_max']:.1f}")
        tail = (f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}x")
        table.add_row(row["wiring"], str(row["rate"]), f"{row['ttft_ms']:.0f}", *per_token, *tail)
    Console(width=110).print(table)


def _split(text: str) -> list[str]:
    """Commas separate wirings and, inside one, layers: a part that begins with a digit belongs to the wiring before it."""
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if names and part[:1].isdigit():
            names[-1] += "," + part
        else:
            names.append(part)
    if not all(names) or len(set(names)) != len(names):
        raise ValueError(f"--wirings {text!r}: name each wiring once")
    return names


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ValueError(f"a rate is a positive number of requests per second or inf, got {text!r}")
    return rate


def _seconds(text: str) -> float:
    for unit, factor in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            try:
                return float(text.removesuffix(unit)) * factor
            except ValueError:
                break
    if text == "0":
        return 0.0
    raise ValueError(f"cannot read the latency {text!r}; write e.g. 500us, 2ms or 0")


def _core_sets(tp: int) -> list[list[int]]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < tp:
        raise ValueError(f"{tp} ranks need {tp} CPU cores; this process may use {len(cores)}")
    share = len(cores) // tp
    return [cores[rank * share : (rank + 1) * share] for rank in range(tp)]


def _bind(cores: list[int]) -> str:
    return ",".join(map(str, cores))


def _file_name(wiring: str) -> str:
    return wiring.replace(":", "_").replace(",", "_")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
