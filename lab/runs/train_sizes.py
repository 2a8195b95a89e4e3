"""Standard and ladder from scratch across sizes and depths, on one GPU; writes results/train/sizes.json.

    python -m lab.runs.train_prepare TEXTS data/books
    python -m lab.runs.train_sizes --out results/train/sizes.json --seconds 3300

Learning rates are swept at the smallest size for each wiring; larger sizes take the best one of their wiring times the square root of
(smallest width / width). Then come the seeds, the other wirings at the middle size, and its parameters in 8, 16 and 32 layers. A run
that is cut short by ``--seconds`` saves a checkpoint; the same command goes on until nothing is left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ladder_residual.common.environment import environment
from ladder_residual.common.files import replace_text
from ladder_residual.train.logs import read_log
from ladder_residual.train.loop import train
from ladder_residual.train.recipe import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SIZES = ("15m", "47m", "125m")  # recipes/train-SIZE-standard.toml
MIDDLE = "47m"
SEEDS = {"15m": 3, "47m": 3, "125m": 2}
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
# Computed as two ranks would where the wiring depends on them.
OTHERS = {
    "hybrid-half": ("ladder:last-half", 1),
    "parallel": ("parallel", 1),
    "desync-2x": ("desync-2x", 2),
    "delayed-1": ("delayed-1", 2),
}
DEPTHS = {  # of the middle size's parameters
    8: dict(hidden_size=640, intermediate_size=1536, num_heads=10, num_layers=8),
    16: dict(hidden_size=448, intermediate_size=1248, num_heads=7, num_layers=16),
    32: dict(hidden_size=320, intermediate_size=928, num_heads=5, num_layers=32),
}


class Run(NamedTuple):
    size: str
    wiring: str
    lr: float
    seed: int = 0
    depth: int | None = None

    @property
    def name(self) -> str:
        return f"{self.size}{f'-{self.depth}-layers' if self.depth else ''}-{self.wiring}-{self.lr:.2e}-{self.seed}"


class Plan(NamedTuple):
    """What is run; smaller for a test."""

    sizes: tuple[str, ...] = SIZES
    seeds: dict[str, int] = SEEDS
    rates: tuple[float, ...] = RATES
    others: tuple[str, ...] = tuple(OTHERS)
    depths: tuple[int, ...] = tuple(DEPTHS)
    overrides: tuple[str, ...] = ()

    def recipe(self, run: Run, directory: Path) -> Recipe:
        spec, ranks = OTHERS.get(run.wiring, (run.wiring, 1))
        own: dict[str, Any] = {f"model.{key}": value for key, value in DEPTHS[run.depth].items()} if run.depth else {}
        own |= {"optimizer.lr": run.lr, "run.seed": run.seed, "model.wiring": spec, "parallel.emulate_ranks": ranks}
        own |= {
            "name": run.name,
            "checkpoint.directory": directory / run.name,
            "checkpoint.export": "false",
            "log.tensorboard": "false",
        }
        return Recipe.load(
            RECIPES / f"train-{run.size}-standard.toml", [*(f"{key}={value}" for key, value in own.items()), *self.overrides]
        )

    def runs(self, done: dict[str, dict[str, Any]]) -> Iterator[Run]:
        """In order; those after the sweep depend on what it found."""
        smallest, best = self.sizes[0], dict[str, float]()
        for wiring in ("standard", "ladder"):
            sweep = [Run(smallest, wiring, lr) for lr in self.rates]
            yield from sweep
            best[wiring] = min(sweep, key=lambda run: done[run.name]["valid"][-1][1]).lr
        width = {size: self.recipe(Run(size, "standard", 1e-3), Path()).model.shape().hidden_size for size in self.sizes}

        def rate(size: str, wiring: str) -> float:
            return best[wiring] * (width[smallest] / width[size]) ** 0.5

        for size in self.sizes:
            for seed in range(self.seeds[size]):
                for wiring in ("standard", "ladder"):
                    yield Run(size, wiring, rate(size, wiring), seed)
        middle = MIDDLE if MIDDLE in self.sizes else self.sizes[-1]
        yield from (Run(middle, wiring, rate(middle, "standard")) for wiring in self.others)
        yield from (
            Run(middle, wiring, rate(middle, wiring), 0, depth) for depth in self.depths for wiring in ("standard", "ladder")
        )


def sweep(plan: Plan, out: Path, directory: Path, seconds: float) -> bool:
    """Whether nothing is left to do."""
    ends = time.monotonic() + seconds
    result: dict[str, Any] = (
        json.loads(out.read_text())
        if out.exists()
        else {"benchmark": "train-sizes", "data": "public-domain books, 16k BPE", "runs": []}
    )
    done = {run["run"]: run for run in result["runs"]}
    for run in plan.runs(done):
        if run.name in done:
            continue
        left = ends - time.monotonic()
        if left <= 0:
            return False
        recipe = plan.recipe(run, directory)
        timer = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))  # train saves a checkpoint then
        timer.start()
        try:
            outcome = train(recipe, quiet=True)
        finally:
            timer.cancel()
        if outcome.get("stopped"):
            return False
        events = read_log(recipe.directory)
        steps = [event for event in events if event["event"] == "train"]
        shape = recipe.model.shape()
        done[run.name] = {
            "run": run.name,
            **run._asdict(),
            "parameters": shape.parameters,
            "layers": shape.num_layers,
            "tokens": recipe.run.steps * recipe.tokens_per_step,
            # A run that was saved at its end and started again evaluates that end once more.
            "valid": list(
                {event["step"]: [event["step"], event["loss"]] for event in events if event["event"] == "valid"}.values()
            ),
            "tokens_per_s": _median([event["tokens_per_s"] for event in steps]),
            "mfu": _median([event["mfu"] for event in steps if "mfu" in event]),
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(out, json.dumps(result | {"runs": list(done.values())} | environment(), indent=1) + "\n")
        print(f"{run.name}: {done[run.name]['valid'][-1][1]:.4f}", flush=True)
    return True


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/sizes"), help="Where checkpoints and logs are kept.")
    parser.add_argument("--seconds", type=float, default=3300)
    parser.add_argument("--set", action="append", default=[], help="For every recipe, such as run.compile=false.")
    arguments = parser.parse_args()
    finished = sweep(Plan(overrides=tuple(arguments.set)), arguments.out, arguments.runs, arguments.seconds)
    print("nothing is left to do" if finished else "not finished: the same command goes on")


if __name__ == "__main__":
    main()
