"""What a request can be refused for before torch is imported, weights are read or a rank is started. Sessions check the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.suggest import did_you_mean
from ..engine import NO_KV_CACHE_DTYPE, REAL_REDUCERS
from ..engine.schedule import SCHEDULES
from ..models.checkpoint_reader import TOKENIZER_CONFIG_BYTES, has_tokenizer, read_json, resolve
from ..models.preflight import CheckedSource, check_source

if TYPE_CHECKING:
    from ..links import Emulation
    from .sampling import Sampling

ENGINES = ("auto", "cuda", "torch")
NO_CHAT_TEMPLATE = "this checkpoint has no chat template; use `ladder generate` with a plain prompt"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a checkpoint is loaded and which engine computes."""

    wiring: str | None = None
    dtype: str = "auto"
    uneven: bool = False
    allow_nonfinite: bool = False
    comm_dtype: str = "same"
    small_allreduce: str = "fixed"
    engine: str = "auto"
    schedule: str = "auto"
    reducer: str = "auto"
    kv_cache_dtype: str = "auto"
    emulation: Emulation | None = None


def check_request(
    source: str | Path, sampling: Sampling, options: LoadOptions, *, tp: int = 1, device: str = "auto"
) -> CheckedSource:
    """ValueError with the fix, if this cannot work on ``tp`` ranks."""
    ranks = options.emulation.tp if options.emulation else tp
    found = check_source(source, tp=ranks, wiring=options.wiring, dtype=options.dtype, uneven=options.uneven)
    check_tokenizer_files((found.adapter or found.checkpoint).directory)
    limit = found.fields.get("max_position_embeddings")
    check_context(1, sampling.max_new_tokens, limit if isinstance(limit, int) else None)
    where = "cuda"
    of_the_engine = (options.reducer, options.kv_cache_dtype) != ("auto", "auto")
    if device == "cuda" or options.engine == "cuda" or of_the_engine or options.emulation:
        from ..distributed.world import local_device  # torch alone knows whether there is a GPU

        where = local_device(device).type
    check_engine(
        options.engine, options.schedule, options.reducer, options.kv_cache_dtype, emulated=options.emulation is not None,
        device=where,
    )  # fmt: skip
    return found


def check_tokenizer_files(directory: Path) -> None:
    if not has_tokenizer(directory):
        raise ValueError(
            f"{directory} has no tokenizer (tokenizer.json, tokenizer.model ...): copy the tokenizer files of the original model there"
        )


def check_chat(source: str | Path) -> None:
    """ValueError unless the checkpoint has a chat template: in a file of its own, or in the tokenizer's config."""
    directory = resolve(source)
    file = directory / "tokenizer_config.json"
    inside = read_json(file, TOKENIZER_CONFIG_BYTES).get("chat_template") if file.exists() else None
    if not inside and not any(directory.glob("chat_template*")) and not (directory / "additional_chat_templates").is_dir():
        raise ValueError(NO_CHAT_TEMPLATE)


def check_context(prompt: int, new: int, limit: int | None) -> None:
    """ValueError unless ``prompt`` and ``new`` tokens fit a context of ``limit``."""
    if limit and prompt + new > limit:
        fix = f"use --max-tokens {limit - prompt}" + (" or shorten the prompt" if prompt > 1 else "")
        if prompt >= limit:
            fix = "shorten the prompt"
        raise ValueError(f"a prompt of {prompt} tokens and {new} new ones exceed the model's context of {limit}: {fix}")


def check_engine(
    engine: str, schedule: str, reducer: str, kv_cache_dtype: str = "auto", *, emulated: bool, device: str
) -> None:  # fmt: skip
    """ValueError unless these go together on a ``device`` (``cpu`` or ``cuda``)."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}{did_you_mean(engine, ENGINES)}; choose auto, cuda or torch")
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(
            f"unknown schedule {schedule!r}{did_you_mean(schedule, SCHEDULES)}; choose from auto, {', '.join(SCHEDULES)}"
        )
    if reducer not in REAL_REDUCERS:
        raise ValueError(f"unknown reducer {reducer!r}; choose {', '.join(REAL_REDUCERS)}")
    if emulated and reducer != "auto":
        raise ValueError(f"--emulate has a link in the place of a reducer: leave out --reducer {reducer}")
    if emulated and (engine == "torch" or device != "cuda"):
        raise ValueError("--emulate needs the CUDA engine and a GPU; `ladder plan` answers without one")
    if reducer != "auto" and (engine == "torch" or device != "cuda"):
        raise ValueError(
            f"--reducer {reducer} is the CUDA engine's, which needs a GPU: leave it out (NCCL or gloo reduce then)"
        )
    if kv_cache_dtype != "auto" and (engine == "torch" or device != "cuda"):
        raise ValueError(NO_KV_CACHE_DTYPE.format(kv_cache_dtype))
    if engine == "cuda" and device != "cuda":
        raise ValueError(f"--engine cuda needs a GPU, this run computes on {device}: use --engine auto or torch")
