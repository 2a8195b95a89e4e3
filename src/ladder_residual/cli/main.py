"""The command ``ladder``: its commands, and what it does with errors."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..distributed.launch import USER_ERROR, run_command
from . import adapt, bench, chat, convert, data, demo, eval, generate, inspect, plan, report, trace, train

COMMANDS: dict[str, dict[str, Any]] = {
    "Use": {
        "demo": demo.demo,
        "plan": plan.plan,
        "convert": convert.convert,
        "inspect": inspect.inspect,
        "generate": generate.generate,
        "chat": chat.chat,
    },
    "Adapt and train": {"data": data.app, "adapt": adapt.adapt, "train": train.app, "eval": eval.evaluate},
    "Measure": {"bench": bench.app, "trace": trace.app, "report": report.report},
}

EXAMPLES = {
    "demo": "ladder demo --export stories",
    "plan": "ladder plan --model llama-3-70b --device h100 --tp 8 --link nccl",
    "convert": "ladder convert stories stories-ladder --wiring ladder:last-half",
    "inspect": "ladder inspect stories-ladder",
    "generate": 'ladder generate stories-ladder -p "Once upon a time" --tp 2',
    "chat": "ladder chat meta-llama/Llama-3.1-8B-Instruct --wiring ladder:last-half --temperature 0.7",
    "data": "ladder data prepare stories/stories.txt corpus --tokenizer stories",
    "data prepare": "ladder data prepare stories/stories.txt corpus --tokenizer stories",
    "data inspect": "ladder data inspect corpus",
    "data sample": "ladder data sample stories samples.jsonl --tokens 2000 --length 128",
    "adapt": "ladder adapt stories-ladder --teacher stories --data stories/stories.txt --batch-tokens 2048 --tokens 20000",
    "train": "ladder train recipes/train-tiny-ladder.toml --set run.steps=100",
    "train run": "ladder train run recipes/train-tiny-ladder.toml --set run.steps=100",
    "train export": "ladder train export runs/tiny-ladder trained",
    "eval": "ladder eval stories-ladder --perplexity stories/stories.txt --against stories",
    "bench": "ladder bench overlap --model ladder-1b --layers 4 --latency 3ms",
    "bench overlap": "ladder bench overlap --model ladder-1b --layers 4 --latency 3ms",
    "bench decode": "ladder bench decode --model llama-3-70b --tp 8 --links 'none;24us'",
    "bench prefill": "ladder bench prefill --model llama-3-70b --tp 8 --prompt 4096 --links h200-nccl",
    "bench e2e": "ladder bench e2e --model llama-3-70b --tp 8 --prompt 1024 --new 64",
    "bench train": "ladder bench train --model ladder-1b --layers 2 --links 2ms",
    "bench calibrate": "ladder bench calibrate --tp 2 --out here.toml",
    "bench link": "ladder bench link --tp 2",
    "trace": "ladder trace plan --model llama-3-70b --tp 8",
    "trace run": "ladder trace run --tp 2 --layers 4 --latency 3ms",
    "trace engine": "ladder trace engine --model llama-3-70b --layers 8 --link 24us",
    "trace plan": "ladder trace plan --model llama-3-70b --tp 8",
    "report": "ladder report results --out report.html",
}

# What other tools call a command of ours, or what is theirs to do.
ELSEWHERE = {
    "serve": "vLLM serves rewired checkpoints: `vllm serve DIR`, docs/serving.md",
    "run": "use 'generate'",
    "finetune": "use 'adapt'",
    "help": "use --help",
    "version": "use --version",
}


class _InOrder(TyperGroup):
    """Lists commands as ``COMMANDS`` does; typer would list those with subcommands last."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for group in COMMANDS.values() for name in group]


app = typer.Typer(
    name="ladder",
    cls=_InOrder,
    help="Tensor parallelism that does not wait for the network: rewire, generate, measure.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        about: dict[str, Any] = {"rich_help_panel": panel, "epilog": f"Example: {EXAMPLES[name]}"}
        if isinstance(command, typer.Typer):
            for below in command.registered_commands:
                below.epilog = f"Example: {EXAMPLES[f'{name} {below.name}']}"
            app.add_typer(command, name=name, **about)
        else:
            app.command(name, **about)(command)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        from ..common.version import __version__

        print(f"ladder-residual {__version__}")
        raise typer.Exit()


def main() -> None:
    """Entry point: what users did wrong is one line and exit code 2."""
    run_command(_run)


def _given(error: Any) -> str:
    """Typer says what a value should be, but not what it was."""
    names, words = getattr(getattr(error, "param", None), "opts", []), sys.argv
    after = [words[i + 1] for i, word in enumerate(words[:-1]) if word in names]
    inside = [word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word]
    return f", got {(after or inside)[0]!r:.60}" if after or inside else ""


def _meant(context: Any, said: str) -> str:
    """What typer does not see: ``gen`` begins ``generate``, another tool's command, a model that is not behind ``--model``."""
    command = getattr(context, "command", None)
    if unknown := re.fullmatch(r"No such command '(\w+)'\.", said):
        if unknown[1] in ELSEWHERE:
            return f": {ELSEWHERE[unknown[1]]}"
        names = [name for name in getattr(command, "commands", {}) if name.startswith(unknown[1])]
        return f". Did you mean {' or '.join(map(repr, names))}?" if names else ""
    if "extra argument" in said and any("--model" in option.opts for option in getattr(command, "params", ())):
        return "; a model goes behind --model"
    return ""


def _run() -> None:
    """A command or option that does not exist is one line too; typer would draw a box of five."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
            print(context.get_help())
            sys.exit(USER_ERROR)
        if not hasattr(error, "format_message"):
            raise
        where = context.command_path if context is not None else "ladder"
        said = f"{error.format_message().rstrip('.')}{_meant(context, str(error))}{_given(error)}"
        raise ValueError(f"{said} (see {where} --help)") from error
    sys.exit(code if isinstance(code, int) else 0)
