"""``ladder bench calibrate``: this host as a device and a link of ``ladder plan``, measured.

    ladder bench calibrate --tp 2 -o my-host.toml
    ladder plan --model llama-3.1-8b --hardware my-host.toml --device here --link here --tp 2

The constants come from GEMMs, from all-reduces, and from decode steps without communication; a step of another batch and one with
communication are predicted with them and printed beside what they took.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from typing import Any

from ..common.environment import environment
from ..distributed.world import World
from ..links.link import Link
from ..models.loading import DTYPES
from ..models.presets import ModelShape
from ..models.random_weights import random_model
from ..plan.calibration import device_toml, link_toml, with_measured_step
from ..plan.hardware import Hardware, shipped
from ..plan.planner import Case, engine_on
from .calibrate_measure import STEP_PROMPT, Sizes, measure_link, measure_rates, measure_step, step_shape
from .checks import check_name

CALIBRATED_BATCHES = (1, 4)  # the gaps of a module with one row, and with more
CHECKED_BATCH = 8


def calibrate(
    world: World, *, name: str = "here", dtype: str = "auto", shape: ModelShape | None = None, sizes: Sizes | None = None
) -> dict[str, Any]:
    """Measure, fit, check. Every rank takes part; the result (with the file as ``toml``) is the same on all."""
    check_name(name)
    if dtype == "auto":
        dtype = "float32" if world.device.type == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose auto or one of {', '.join(DTYPES)}")
    kind = DTYPES[dtype]
    facts = environment()
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''} at once"
    processor = facts["machine" if world.device.type == "cpu" else "gpu"]
    about = f"{processor}, {ranks}, {dtype}, {facts['date']}, torch {facts['torch']}"
    if kind.itemsize != 2:
        about += f" (a number of {kind.itemsize} bytes counts as the planner's 2)"

    rates = measure_rates(world, kind, sizes)
    table: dict[str, Any] = {**asdict(rates), "source": f"measured: {about}"}
    samples = measure_link(world, kind) if world.size > 1 else []
    link = "\n" + link_toml(name, samples, world.size, f"measured: {about}") if samples else ""
    checks: list[dict[str, Any]] = []
    shape = shape or step_shape()
    if world.device.type == "cpu":  # on a GPU the gaps are those of the engine, not of the eager model timed here
        table["engine"] = "cpu"
        hardware = read_toml(device_toml(name, **table) + link)
        model = random_model(shape, world, kind)
        for batch, field in zip(CALIBRATED_BATCHES, ("module_us", "module_us_batched"), strict=True):
            measured = measure_step(world, model, "no-comm", batch)
            table[field] = fitted_gap(hardware, name, shape, world.size, batch, measured)
        hardware = read_toml(device_toml(name, **table) + link)
        for wiring in ("no-comm", *(("standard", "ladder") if samples else ())):
            measured = measure_step(world, model, wiring, CHECKED_BATCH)
            planned = planned_ms(hardware, name, shape, world.size, CHECKED_BATCH, wiring)
            error = 100 * (planned / measured - 1)
            took = {"measured_ms": measured, "planned_ms": planned, "error_percent": error}
            checks.append({"wiring": wiring, "batch": CHECKED_BATCH, **took})
    return {
        "benchmark": "calibrate",
        "toml": f"# Written by `ladder bench calibrate`.\n{device_toml(name, **table)}{link}",
        "name": name,
        "tp": world.size,
        "dtype": dtype,
        "device": table,
        "link_samples_us": [[size, us] for size, us in samples],
        "step_model": f"{shape.num_layers} layers of {shape.hidden_size}",
        "checks": checks,
        **facts,
    }


def read_toml(text: str) -> Hardware:
    """The shipped hardware and what ``text`` adds, as ``--hardware`` would read it."""
    return shipped().with_tables(tomllib.loads(text), "calibration")


def _case(hardware: Hardware, name: str, shape: ModelShape, tp: int, batch: int, *, quiet: bool) -> Case:
    device = hardware.device(name)
    link = Link(name="none", title="none") if quiet else hardware.link(name, device)
    where: dict[str, Any] = {"device": device, "link": link, "engine": engine_on(device), "tp": tp, "real_ranks": not quiet}
    return Case(model=shape, **where, batch=batch, prompt=STEP_PROMPT, new=2)


def fitted_gap(hardware: Hardware, name: str, shape: ModelShape, tp: int, batch: int, measured_ms: float) -> float:
    """Microseconds of gaps in a module that explain a step without communication."""
    case = _case(hardware, name, shape, tp, batch, quiet=True)
    profile = with_measured_step(case, case.decode_phase(), measured_ms)
    return max(0.1, profile.module_us if batch == 1 else profile.module_us_batched)  # 0 in the file would mean: not measured


def planned_ms(hardware: Hardware, name: str, shape: ModelShape, tp: int, batch: int, wiring: str) -> float:
    case = _case(hardware, name, shape, tp, batch, quiet=wiring == "no-comm")
    return case.timeline(wiring, case.decode_phase()).us / 1e3
