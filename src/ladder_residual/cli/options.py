"""Option types and parsers that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..common.suggest import did_you_mean


def one_of(*values: str) -> dict[str, Any]:
    """For an option of a few values: refused by name before anything is imported, and completed by the shell."""

    def check(param: typer.CallbackParam, value: str) -> str:
        if value not in values:
            name = str(param.name).replace("_", "-")
            raise ValueError(f"unknown {name} {value!r}{did_you_mean(value, values)}; choose from {', '.join(values)}")
        return value

    return {"callback": check, "autocompletion": lambda: list(values)}


def _above_zero(param: typer.CallbackParam, value: float) -> float:
    if not value > 0:
        raise ValueError(f"--{param.name} must be above 0 seconds, got {value}")
    return value


Source = Annotated[str, typer.Argument(help="Checkpoint directory, or hub id owner/name.")]
Shape = Annotated[
    str,
    typer.Option(
        "--model", help="Published shape (random weights) or checkpoint directory (on a GPU its shape, with random weights)."
    ),
]
Layers = Annotated[int | None, typer.Option(help="Use only so many layers of the shape.")]
_RANKS = "Tensor-parallel ranks; starts them unless torchrun has."
Ranks = Annotated[int | None, typer.Option("--tp", help=_RANKS, show_default="1")]
MeasuredRanks = Annotated[int | None, typer.Option("--tp", help=_RANKS)]  # by default more than one
ShareGpu = Annotated[
    bool,
    typer.Option(
        "--share-gpu", help="Let several ranks share a GPU: real all-reduces on one card (CUDA MPS makes them run at once)."
    ),
]
AllowNonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Load weights that hold NaN or infinite numbers all the same.")
]
Uneven = Annotated[bool, typer.Option("--uneven", help="Allow ranks with unequal numbers of heads.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.", **one_of("auto", "cpu", "cuda"))]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto (as stored), float32, bfloat16 or float16.",
        **one_of("auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16"),
    ),
]
Wiring = Annotated[
    str | None, typer.Option("--wiring", help="Another wiring than the checkpoint's own, such as ladder:last-half.")
]
MaxTokens = Annotated[
    int, typer.Option("--max-new-tokens", "--max-tokens", "-n", help="Tokens to generate at most, for each prompt.")
]
Wirings = Annotated[str, typer.Option(help="Comma-separated, e.g. standard,ladder:last-half,ladder.")]
Links = Annotated[
    str,
    typer.Option(
        help="Emulated all-reduce: none, 24us, '24us,no-pdl', h200-nccl, 'alpha=12,beta=90'; several with ';' between."
    ),
]
Repeats = Annotated[int, typer.Option(help="Measured runs per case.")]
Timeout = Annotated[float, typer.Option(help="Seconds a rank waits for the others before it gives up.", callback=_above_zero)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Schedule = Annotated[
    str,
    typer.Option(
        help="Of the CUDA engine: serial, two_stream, interleaved, or auto (the fastest, measured at start-up).",
        **one_of("auto", "serial", "two_stream", "interleaved"),
    ),
]
KVCacheDtype = Annotated[
    str,
    typer.Option(
        help="Keys and values in the CUDA engine: auto (the model's dtype) or fp8 (half the memory, for twice the context).",
        **one_of("auto", "fp8"),
    ),
]
CommDtype = Annotated[
    str,
    typer.Option(
        help="What CPU ranks send in an all-reduce: same (the model's dtype) or bf16 (rounded; half of float32).",
        **one_of("same", "bf16"),
    ),
]
SmallAllreduce = Annotated[
    str,
    typer.Option(
        help="Which all-reduces CPU ranks send directly to each other: fixed (by size) or measured (by size, on this link).",
        **one_of("fixed", "measured"),
    ),
]


_STORED = "as the checkpoint says"


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What `ladder generate` and `ladder chat` have in common."""

    tp: Ranks = None
    share_gpu: ShareGpu = False
    wiring: Wiring = None
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default=_STORED)] = None
    top_k: Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.", show_default=_STORED)] = (
        None
    )
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the likeliest tokens that have this probability together.", show_default=_STORED),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from tokens of at least this share of the likeliest one's probability.", show_default=_STORED
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1, tokens that occurred become less likely.", show_default=_STORED)
    ] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop after this string; may be repeated.")] = None
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same text; more ranks differ by rounding at most.", show_default="a random one"
        ),
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            help="auto, cuda (fused kernels, CUDA graphs) or torch (any device, any model).", **one_of("auto", "cuda", "torch")
        ),
    ] = "auto"
    schedule: Schedule = "auto"
    reducer: Annotated[
        str,
        typer.Option(
            "--reducer",
            help="All-reduce of the CUDA engine: nccl, symm (symmetric memory, within a host), or auto (the faster, timed at start-up).",
            **one_of("auto", "nccl", "symm"),
        ),
    ] = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    device: Device = "auto"
    dtype: Dtype = "auto"
    uneven: Uneven = False
    allow_nonfinite: AllowNonfinite = False
    timeout: Timeout = 120.0


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """A parameter of a command whose type is a dataclass stands for its fields, an option each."""
    groups: dict[str, Any] = {}
    options: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            options += signature(kind, eval_str=True).parameters.values()
        else:
            options.append(parameter)

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__signature__ = Signature([option.replace(kind=Parameter.KEYWORD_ONLY) for option in options])  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


class RunByDefault(TyperGroup):
    """``ladder trace --tp 2`` is ``ladder trace run --tp 2``, and ``ladder train recipe.toml`` ``ladder train run recipe.toml``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_words = any(param.param_type_name == "argument" for param in self.commands["run"].params)
        if args and args[0] not in (*self.commands, *ctx.help_option_names) and (takes_words or args[0].startswith("-")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


def split_wirings(text: str) -> list[str]:
    """Commas separate wirings and, inside one, layers: a part that names layers (``5``, ``8-11``, ``last-2``) belongs
    to the wiring before it."""
    return _split(text, "wirings", ",", r"\d|first-|last-")


def split_links(text: str) -> list[str]:
    """Links with ``;`` or ``,`` between; ``beta=..`` and ``no-pdl`` belong to the link before them."""
    return _split(text, "links", "[;,]", r"beta=|no-pdl")


def _split(text: str, option: str, separator: str, belongs_to_last: str) -> list[str]:
    names: list[str] = []
    for part in map(str.strip, re.split(separator, text)):
        if names and re.match(belongs_to_last, part):
            names[-1] += "," + part
        else:
            names.append(part)
    if not all(names):
        raise ValueError(f"--{option} {text!r}: an empty name between separators")
    return names


def whole_numbers(text: str, option: str) -> list[int]:
    """``1,4,16`` -> [1, 4, 16]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 10**7 for part in parts):
        raise ValueError(f"--{option} takes whole numbers above 0 with commas between, such as 1,4,16; got {text!r}")
    return [int(part) for part in parts]


def at_least_one(**numbers: int | None) -> None:
    """Refuse options below 1; None is an option that was not given."""
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
