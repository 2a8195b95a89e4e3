"""What users write themselves: wirings, recipes of ``train`` and ``adapt``, and the planner's hardware files."""

from __future__ import annotations

import contextlib
import io
import json
import math
import tomllib
from dataclasses import asdict
from random import Random
from typing import Any

from lab.fuzz.box import Box
from lab.fuzz.judge import check_values, require
from lab.fuzz.mutate import broken_toml, hostile_value, mutate_bytes

TRAIN = """
[model]
preset = "smollm2-135m"
num_layers = 4
wiring = "ladder:last-half"
[data]
train = "shards"
sequence = 128
[batch]
rows = 8
[parallel]
tp = 2
[optimizer]
lr = 3e-4
betas = [0.9, 0.95]
warmup = 10
[run]
steps = 20
[checkpoint]
every = 5
"""
ADAPT = """
student = "smollm2-ladder"
teacher = "smollm2"
method = "distill"
tokens = 24_000_000
sequence = 1024
batch_tokens = 16_384
learning_rate = 1e-3
optimizer = "muon"
warmup = 0.02
hidden_weight = 1.0
stages = ["ladder:last-half"]
heldout = ["test.txt"]
compile = true
save_every = 500
[[data]]
path = "books.txt"
weight = 0.4
[[data]]
path = "samples.jsonl"
weight = 0.6
"""
HARDWARE = """
[devices.mine]
title = "a GPU"
memory_gb = 80
bandwidth_gbs = 2039
tflops = 312
bandwidth_share = 0.9
flop_share = 0.7
[devices.cpu-host]
memory_gb = 64
bandwidth_gbs = 40.5
tflops = 1.5
engine = "cpu"
module_us = 20.0
[links.lan]
title = "a link"
alpha_us = 24.5
bandwidth_gbs = 90
ranks = 4
source = "measured"
"""


def wiring(box: Box, chance: Random) -> None:
    from ladder_residual.core.config import Wiring

    names = ["ladder", "standard", "parallel", "desync-2x", "delayed-1", "no-comm", "desync", "delayed-"]
    layers = ["", ":last-half", ":0-3", ":5", ":first-2,last-2", ":3-1", ":", ":-1", ":99999999999", ":٣", ":0-99999"]
    text = chance.choice(names) + chance.choice(layers) + chance.choice(["", "", "", "", "@2", "@", "@-1", "@99999999999999"])
    if chance.random() < 0.3:
        text = mutate_bytes(text.encode(), chance).decode("utf-8", "surrogateescape")
    count = chance.choice([1, 2, 5, 32, 32, 80, 100_000, 0, -1, 10**12])
    spec: Any = text if chance.random() < 0.95 else hostile_value(chance)
    parsed = Wiring.parse(spec, count)
    require(Wiring.parse(parsed.spec, count) == parsed, f"{parsed.spec!r} does not parse back to the same wiring")
    require(all(0 <= layer < count for layer in parsed.layers), f"{spec!r:.60} names layers that a model of {count} has not")


def recipe(box: Box, chance: Random) -> None:
    from ladder_residual.train.recipe import PATHS, Recipe

    box.empty()
    path = box.path / "recipe.toml"
    path.write_bytes(broken_toml(TRAIN, chance, ["base", "log", "evaluate", "name", "options", "wandb"]))
    override = f"{chance.choice(['run.steps', 'model.wiring', 'a', 'a.b.c'])}={chance.choice(['1', 'x', '[', ''])}"
    overrides = [override] if chance.random() < 0.2 else []
    loaded = Recipe.load(path, overrides)
    _ = loaded.wiring, loaded.tokens_per_step
    asked = tomllib.loads(path.read_text(encoding="utf-8"))
    for name in PATHS:  # relative to the recipe
        table, _, key = name.partition(".")
        if asked.get(table, {}).get(key):
            asked[table][key] = str(box.path / asked[table][key])
    if not overrides and "base" not in asked:
        check_values(loaded.to_dict(), asked)


def adapt_recipe(box: Box, chance: Random) -> None:
    from ladder_residual.adapt.settings import read_recipe

    box.empty()
    path = box.path / "recipe.toml"
    path.write_bytes(broken_toml(ADAPT, chance, ["base", "control", "out", "tokens", "keep", "top_k", "parallel", "beta1"]))
    settings = read_recipe(path)
    _ = settings.rows, settings.evaluate_rows, settings.output
    asked = tomllib.loads(path.read_text(encoding="utf-8"))
    if isinstance(asked.get("data"), list):
        asked["data"] = [{"path": source} if isinstance(source, str) else source for source in asked["data"]]
    if "base" not in asked:
        check_values(asdict(settings), asked)


def hardware(box: Box, chance: Random) -> None:
    """Planned with as `ladder plan --hardware` does: every number of the plan must be one."""
    from ladder_residual.cli.plan import plan
    from ladder_residual.plan.hardware import shipped

    box.empty()
    path = box.path / "hardware.toml"
    path.write_bytes(
        broken_toml(HARDWARE, chance, ["library", "curves", "in_situ_us", "allreduce", "ring", "max_ranks", "pdl"])
    )
    known = shipped().extended(path)
    asked = tomllib.loads(path.read_text(encoding="utf-8"))
    for kind, held in (("devices", known.devices), ("links", known.links)):
        for name, table in asked.get(kind, {}).items():
            check_values(asdict(held[name]), table, f"{kind}.{name}.")
    options: dict[str, Any] = dict(
        tp=str(chance.choice([1, 2, 4])), batch=chance.choice(["1", "16"]), hybrid=chance.random() < 0.2
    )
    options |= dict(
        device=chance.choice([*asked.get("devices", {}), "h100"]), link=chance.choice([*asked.get("links", {}), "24us"])
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        plan("llama-3.2-1b", prompt=64, new=8, hardware=[path], as_json=True, **options)
    check_numbers(json.loads(printed.getvalue()))
    if chance.random() < 0.3:
        with contextlib.redirect_stdout(io.StringIO()):
            plan("llama-3.2-1b", prompt=64, new=8, hardware=[path], **options)


def check_numbers(value: Any, where: str = "the plan") -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            check_numbers(item, f"{where}, {key}")
    elif isinstance(value, list):
        for item in value:
            check_numbers(item, where)
    elif isinstance(value, int | float):
        require(math.isfinite(value) and value > -1e-9, f"{where} is {value}")
