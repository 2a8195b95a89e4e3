"""``plan`` of the Python API; ``ladder plan`` prints what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..models.presets import ModelShape
from .advice import advise
from .hardware import Hardware, shipped
from .planner import PlanRow, evaluate_all, make_cases


def plan(
    model: str | Path | ModelShape,
    *,
    device: str = "h100",
    tp: int | Sequence[int] = 8,
    link: str | Sequence[str] = "nccl",
    batch: int | Sequence[int] = 1,
    prompt: int = 1024,
    new: int = 512,
    engine: str | None = None,
    weights: str | None = None,
    kv_cache_dtype: str = "bf16",
    hardware: Hardware | Sequence[str | Path] = (),
) -> list[PlanRow]:
    """Predict tokens/s, memory and speed-up of every wiring on a machine. Imports no torch and needs no GPU.

    Args:
        model: A preset such as ``"llama-3-70b"``, a directory with ``config.json``, or a hub id (only its config is fetched).
        device: ``"a100"``, ``"h100"``, ``"h200"``, ``"cpu-server"`` ...; ``ladder plan --list`` shows all.
        tp: Tensor-parallel ranks, one number or several.
        link: What carries the all-reduces, one or several: ``"nccl"``, ``"one-shot"``, ``"10gbe"``, ``"24us"`` ...
        batch: Sequences at a time, one number or several.
        prompt: Prompt tokens of each sequence.
        new: New tokens of each sequence.
        engine: Engine profile: ``"fused"``, ``"compiled"``, ``"paper"``, ``"cpu"``. Default: the device's own, else ``"fused"``.
        weights: Of the layers' matrices: ``"bf16"``, ``"fp8"`` or ``"int4"``. Default: as ``config.json`` says, else ``"bf16"``.
        kv_cache_dtype: ``"bf16"`` or ``"fp8"``.
        hardware: TOML files with devices and links of your own.

    Returns:
        A row per tp, link and batch: ``advice`` (a sentence), ``speedup`` and ``tokens_per_second`` by wiring, ``memory_gb``,
        ``fits`` ...

    Raises:
        ValueError: If a name is unknown, the model does not divide over ``tp`` ranks, or no row fits the device's memory.

    Examples:
        >>> [row] = plan("llama-3-70b", device="h100", tp=8, link="nccl")
        >>> row.speedup["ladder"] > 1.2
        True
        >>> row.advice.split(":")[0]
        'Convert llama-3-70b (tp 8, nccl, batch 1)'
    """
    known = hardware if isinstance(hardware, Hardware) else with_files(hardware)
    cases = make_cases(
        str(model) if isinstance(model, Path) else model,
        device=device,
        tp=[tp] if isinstance(tp, int) else tp,
        link=[link] if isinstance(link, str) else link,
        batch=[batch] if isinstance(batch, int) else batch,
        prompt=prompt,
        new=new,
        engine_name=engine,
        hardware=known,
        weights=weights,
        kv_cache=kv_cache_dtype,
    )
    return [replace(row, advice=advise(row)) for row in evaluate_all(cases)]


def with_files(files: Sequence[str | Path]) -> Hardware:
    """The shipped devices and links, and those of ``files``."""
    hardware = shipped()
    for file in files:
        hardware = hardware.extended(file)
    return hardware
