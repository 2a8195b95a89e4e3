"""The command ``ladder``: parse, call, print. Everything heavy is imported inside the commands."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .adapt.commands import adapt
from .bench.calibrate import calibrate_command
from .bench.commands import Device, Dtype, Ranks, Uneven, bench
from .bench.faults.commands import faults
from .bench.fuzz.commands import fuzz
from .bench.hosts import commands as host_commands
from .bench.serve import serve
from .bench.soak import soak
from .bench.vllm_one_rank import vllm_tp1
from .corpus.commands import app as data_app
from .evaluate.command import evaluate
from .launch import follow_launcher, on_ranks, report_error, told
from .plan.commands import app as plan_app
from .plan.report_commands import report, reproduction
from .plan.trace_commands import trace_app
from .train.commands import app as train_app

app = typer.Typer(
    name="ladder",
    help="Tensor parallelism that does not wait for the network: rewire, generate, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
bench.command("calibrate")(calibrate_command)
bench.command("serve")(serve)
bench.command("vllm-tp1")(vllm_tp1)
bench.command("hosts")(host_commands.hosts)
bench.command("hosts-ranks", hidden=True)(host_commands.hosts_ranks)
bench.command("hosts-report")(host_commands.hosts_report)
bench.command("link")(host_commands.link)
bench.command("faults")(faults)
bench.command("fuzz")(fuzz)
bench.command("soak")(soak)
app.add_typer(plan_app, name="plan")
app.add_typer(trace_app, name="trace")
app.command("adapt")(adapt)
app.command("eval")(evaluate)
app.add_typer(data_app, name="data")
app.add_typer(train_app, name="train")
app.command("report")(report)
app.command("reproduction")(reproduction)

Source = Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")]
WiringOption = Annotated[str | None, typer.Option("--wiring", help="Another wiring than the checkpoint's own.")]
Timeout = Annotated[float, typer.Option(help="Seconds a rank waits for the others before it gives up.")]
Engine = Annotated[str, typer.Option(help="auto, cuda (fused kernels, CUDA graphs) or torch (any device, any model).")]
Sums = Annotated[
    str, typer.Option("--reducer", help="Of the CUDA engine's ranks: nccl, or symm (symmetric memory, within a host).")
]
Schedule = Annotated[str, typer.Option(help="Of the CUDA engine: one, two (lanes), woven, or auto (measured at start-up).")]
Emulate = Annotated[
    str | None,
    typer.Option(
        help="Be rank 0 of ranks that are not there, for the speed alone: tp=8,link=h200-nccl, link=24us or link=24us+launch."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False
) -> None:
    if version:
        from . import __version__

        print(f"ladder-residual {__version__}")
        raise typer.Exit()


@app.command()
def convert(
    source: Source,
    target: Annotated[Path, typer.Argument(help="Directory to write.")],
    wiring: Annotated[
        str,
        typer.Option(help="e.g. ladder, ladder:last-half, ladder:16-31, desync-2x; standard is the way back; auto chooses."),
    ],
    copy: Annotated[bool, typer.Option("--copy/--link", help="Copy the weights instead of linking them.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")] = False,
    layers: Annotated[int | None, typer.Option(help="With auto: how many layers to convert.")] = None,
    budget: Annotated[float | None, typer.Option(help="With auto: by how many nats the loss may rise, before healing.")] = None,
    calibration: Annotated[str | None, typer.Option(help="With auto: text to choose the layers on (.txt, .jsonl).")] = None,
    check: Annotated[
        str | None, typer.Option(help="With auto: text to check the choice on; default: the rest of the calibration text.")
    ] = None,
    calibration_tokens: Annotated[int | None, typer.Option(help="With auto; default: 4096 on a CPU, 65536 on a GPU.")] = None,
    device: Device = "auto",
) -> None:
    """Rewire a checkpoint: its config changes, its weights stay."""
    from .convert import check_target, describe
    from .convert import convert as run

    options = {"--layers": layers, "--budget": budget, "--calibration": calibration, "--check": check}
    if wiring != "auto":
        if given := [name for name, value in options.items() if value is not None]:
            raise ValueError(f"{', '.join(given)} belong to --wiring auto; with --wiring {wiring} the layers are named already")
        describe(run(source, target, wiring, copy=copy, overwrite=overwrite), print)
        return
    if calibration is None:
        raise ValueError("--wiring auto measures what each layer costs: give it a text with --calibration FILE")
    from .adapt.auto import Request, choose, explain, save

    request = Request(calibration, layers, budget, check, calibration_tokens)
    check_target(source, target, overwrite)
    spec, document = choose(source, request, device)
    explain(document)
    describe(run(source, target, spec, copy=copy, overwrite=overwrite), print)
    save(document, target)


@app.command()
def inspect(source: Source, as_json: Json = False) -> None:
    """Family, wiring layer by layer, size, and memory per rank."""
    from .inspection import inspect_checkpoint

    result = inspect_checkpoint(source)
    if as_json:
        print(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"family      {result['family']}", highlight=False)
    console.print(f"wiring      {result['wiring']}", highlight=False)
    console.print(f"layers      {result['picture']}  (| standard, # rewired; layer 0 at the left)", highlight=False)
    console.print(f"parameters  {result['parameters']:,} in {result['dtype']}", highlight=False)
    table = Table("tp", "weights per rank", "KV cache per token and rank")
    for tp, row in result["ranks"].items():
        if "refused" in row:
            table.add_row(str(tp), "-", row["refused"])
        else:
            table.add_row(str(tp), f"{row['weight_bytes'] / 2**20:,.1f} MiB", f"{row['kv_bytes_per_token'] / 2**10:,.1f} KiB")
    console.print(table)


@app.command()
def generate(
    source: Source,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The text to go on from; '-' reads standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts: a line each, or .jsonl with prompt / messages.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where completions of --file go, as JSONL; default: standard output.")
    ] = None,
    tp: Ranks = None,
    wiring: WiringOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: as the checkpoint says.")] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop after this string; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text, on any number of ranks.")] = None,
    num_beams: Annotated[int, typer.Option()] = 1,
    batch_size: Annotated[int, typer.Option(help="Prompts of --file per batch.")] = 8,
    engine: Engine = "auto",
    schedule: Schedule = "auto",
    reducer: Sums = "nccl",
    emulate: Emulate = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    uneven: Uneven = False,
    wire: host_commands.Wire = "same",
    exchange: host_commands.Exchange = "fixed",
    timeout: Timeout = 120.0,
) -> None:
    """Generate text from a prompt (streamed) or from a file of prompts."""
    if (prompt is None) == (file is None):
        raise ValueError("give either --prompt TEXT or --file FILE")
    if out is not None and file is None:
        raise ValueError("--out takes the completions of --file; a single --prompt goes to standard output")
    if out is not None and file is not None and out.resolve() == file.resolve():
        raise ValueError(f"--out and --file are the same file ({out}): the prompts would be overwritten")
    if batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {batch_size}")
    from .engine.emulate import parse_emulation

    emulated = parse_emulation(emulate) if emulate is not None else None
    if emulated and tp is not None:
        raise ValueError(f"--emulate {emulate} brings its own tp: leave out --tp {tp}")
    on_ranks(tp)
    from .generate import (
        Sampling,
        Stopwatch,
        check_text,
        complete,
        complete_all,
        load_tokenizer,
        read_prompts,
        tokenize,
        with_engine,
        with_seed,
    )
    from .hf_config import wiring_of
    from .line_writer import LineWriter, silent
    from .link_probe import chosen_reducer
    from .loading import load_model
    from .parallel import distributed

    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        seed=seed,
        num_beams=num_beams,
    )
    with distributed(device, timeout) as world:
        tokenizer = load_tokenizer(source)
        if prompt == "-":
            if world.size > 1:
                raise ValueError("--prompt - reads standard input, which only one process has; use --file")
            prompt = sys.stdin.read()
        prompts, are_chats = ([prompt], False) if prompt is not None else read_prompts(_given(file), tokenizer)
        check_text(prompts)
        world.check_same("the prompts", repr(prompts))
        sampling = with_seed(sampling, world)
        longest = max(len(ids) for ids in tokenize(tokenizer, prompts)["input_ids"])
        if emulated and world.size > 1:
            raise ValueError(f"--emulate runs in one process, here are {world.size}")
        share = replace(world, size=emulated.tp, emulated=True) if emulated else world
        model = with_engine(
            load_model(
                source,
                share,
                wiring=wiring,
                dtype=dtype,
                uneven=uneven,
                reducer=chosen_reducer(world, exchange=exchange, wire=wire),
            ),
            share,
            engine,
            batch=min(batch_size, len(prompts)),
            context=longest + max_new_tokens,
            beams=num_beams,
            schedule=schedule,
            reducer=reducer,
            link=emulated.link if emulated else None,
        )
        label = {}
        if emulated:
            label = {"emulated": str(emulated)}
            print(f"{emulated}: the others' parts of every sum are missing, so the words mean nothing", file=sys.stderr)
        watch = Stopwatch()
        if file is not None:
            with LineWriter(out) if world.is_main else silent() as sink, watch:
                for completion in complete_all(
                    model, tokenizer, prompts, sampling, world, batch_size=batch_size, chat=are_chats
                ):
                    watch.tokens += completion.new_tokens
                    sink.write(completion.to_json(**label))
        else:
            assert prompt is not None
            streamed = num_beams == 1
            with watch:
                completion = complete(model, tokenizer, [prompt], sampling, world, stream=streamed)[0]
            watch.tokens = completion.new_tokens
            if world.is_main and not streamed:
                print(prompt + completion.text)
        if world.is_main:
            ranks = str(emulated) if emulated else "1 process" if world.size == 1 else f"{world.size} ranks"
            print(f"[{wiring_of(model.config).spec}, {ranks}, {world.device.type}] {watch}", file=sys.stderr)


def _given(path: Path | None) -> Path:
    assert path is not None
    return path


@app.command()
def chat(
    source: Source,
    tp: Ranks = None,
    wiring: WiringOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 512,
    temperature: Annotated[float | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    engine: Engine = "auto",
    schedule: Schedule = "auto",
    reducer: Sums = "nccl",
    context: Annotated[int, typer.Option(help="Tokens the CUDA engine's cache holds.")] = 8192,
    device: Device = "auto",
    dtype: Dtype = "auto",
    uneven: Uneven = False,
    timeout: Timeout = 120.0,
) -> None:
    """Talk with a model that has a chat template. An empty line or end of input ends it."""
    on_ranks(tp)
    from .generate import Sampling, chat_prompt, complete, fits, load_tokenizer, with_engine, with_seed
    from .loading import load_model
    from .parallel import distributed

    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with distributed(device, timeout) as world:
        tokenizer = load_tokenizer(source)
        messages = [{"role": "system", "content": system}] if system else []
        first = len(messages)
        chat_prompt(tokenizer, [*messages, {"role": "user", "content": "?"}])  # no template: say so before loading weights
        model = load_model(source, world, wiring=wiring, dtype=dtype, uneven=uneven)
        model = with_engine(model, world, engine, batch=1, context=context, beams=1, schedule=schedule, reducer=reducer)
        sampling = with_seed(sampling, world)
        for turn in range(1_000_000):
            line = world.ask(lambda: _read_line("you> "), turn)
            if not line:
                break
            messages.append({"role": "user", "content": line})
            while not fits(model, tokenizer, text := chat_prompt(tokenizer, messages), sampling) and len(messages) > first + 1:
                del messages[first : first + 2]  # the oldest question and its answer make room
            answer = complete(model, tokenizer, [text], sampling, world, stream=True, chat=True, turn=turn)[0]
            messages.append({"role": "assistant", "content": answer.text.strip()})


def _read_line(label: str) -> str:
    if sys.stdin.isatty():
        print(label, end="", flush=True, file=sys.stderr)
    return sys.stdin.readline().strip()


@app.command()
def demo(
    as_json: Json = False,
    export: Annotated[Path | None, typer.Option(help="Only write the shipped checkpoint to this directory.")] = None,
) -> None:
    """Convert, generate and measure on the tiny model the package ships; offline, under a minute."""
    if export is not None:
        from .convert import convert as rewrite
        from .demo import demo_directory

        rewrite(demo_directory(), export, "standard", copy=True)
        print(f"written  {export}")
        return
    from .demo import run

    result = run((lambda line: print(line, file=sys.stderr)) if as_json else print)
    if as_json:
        print(json.dumps(result))


@app.command("demo-ranks", hidden=True)
def demo_ranks(workdir: Path) -> None:
    from .demo import rank_main

    rank_main(workdir)


def main() -> None:
    """Entry point: what users did wrong is one line and exit code 2."""
    follow_launcher()
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        known = told(error)
        if known is None:
            raise
        report_error(*known)
        sys.exit(known[1])
