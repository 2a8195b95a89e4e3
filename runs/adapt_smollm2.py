"""Healing SmolLM2-135M-Instruct on one GPU: the runs behind docs/adaptation.md.

    python runs/fetch_smollm2.py smollm2
    python runs/adapt_prepare.py smollm2 TEXTS rows
    python runs/adapt_smollm2.py pilot --model smollm2 --rows rows --work work --out results/adapt
    python runs/adapt_smollm2.py heal  --model smollm2 --rows rows --work work --out results/adapt --seconds 560

``pilot`` measures speed and tries learning rates; ``heal`` makes the runs of the document, most important first, until
``--seconds`` are used up. Each result is on disk as soon as it is there. Texts: books, GSM8K questions with answers, and the model's
own samples, drawn here first; WikiText-2 is measured on and never trained on.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ladder_residual.adapt.objective import detach
from ladder_residual.adapt.rows import LEARN, MixedRows, RowStore
from ladder_residual.adapt.run import Curve, build_trainer, load_models, save_result
from ladder_residual.adapt.settings import Settings, Source
from ladder_residual.model import rewire
from ladder_residual.parallel import World, distributed

ROWS = 32  # of a step
SOURCES = (Source("books", 0.4), Source("samples", 0.45), Source("gsm8k", 0.15))
HELDOUT = ("books_heldout", "wikitext2", "samples_heldout")
MODEL = "SmolLM2-135M-Instruct (4-bit weights, dequantised)"
START = time.monotonic()


class Bench:
    """One student and one teacher, compiled once and used by every run: weights and wiring are put back in between."""

    def __init__(self, model: Path, rows: Path, work: Path, out: Path, world: World, name: str, compile: bool = True) -> None:
        self.model, self.work, self.out, self.world = model, work, out, world
        work.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / f"{name}.json"
        self.stores = {
            path.name.removesuffix(".npy"): load_rows(path) for path in rows.glob("*.npy") if ".use" not in path.name
        }
        self.compile = compile
        self.sequence = next(iter(self.stores.values())).ids.shape[1]
        self.layers = json.loads((model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
        self.record: dict[str, Any] = {"benchmark": f"adapt {name}", "model": MODEL, **conditions(world), "runs": []}

    def draw_samples(self, tokens: int, batch: int, length: int) -> None:
        """The model's own samples: begun like documents with a random word, and chats it holds with itself."""
        for name, seed, amount in (("samples", 0, tokens), ("samples_heldout", 10_000, 1)):
            path = self.work / f"{name}.npy"
            if not path.exists():
                self.record[f"drawing {name}"] = sample_rows(
                    self.model, path, self.world, amount, batch, length, seed, self.sequence
                )
            self.stores[name] = load_rows(path)
            self.log(f"{name}: {len(self.stores[name]):,} rows; {self.record.get(f'drawing {name}')}")

    def last(self, share: float) -> str:
        """The upper ``share`` of the layers."""
        return f"ladder:{self.layers - round(share * self.layers)}-{self.layers - 1}"

    def stages(self, firsts: tuple[float, ...]) -> tuple[str, ...]:
        return tuple(f"ladder:{round(first * self.layers)}-{self.layers - 1}" for first in firsts)

    def load(self) -> None:
        began = time.monotonic()
        settings = self.settings("ladder", tokens=self.sequence * ROWS)
        self.models = load_models(settings, self.world)
        self.original = {name: tensor.detach().clone() for name, tensor in self.models.student.state_dict().items()}
        self.log(f"models loaded in {time.monotonic() - began:.1f} s")

    def settings(self, wiring: str, **changes: Any) -> Settings:
        defaults: dict[str, Any] = dict(
            student=str(self.model),
            teacher=str(self.model),
            out=str(self.work / "unused"),
            data=SOURCES,
            sequence=self.sequence,
            batch_tokens=ROWS * self.sequence,
            compile=self.compile,
            evaluate_tokens=2 * ROWS * self.sequence,
            progress=False,
            log_every=20,
        )
        return Settings(**defaults | changes)

    def run(
        self, name: str, wiring: str, *, points: int = 6, keep: bool = False, final_rows: int = 256, **changes: Any
    ) -> dict[str, Any]:
        settings = self.settings(wiring, **changes)
        student = self.models.student
        detach(student)
        student.load_state_dict(self.original)
        rewire(student, wiring)
        rows = MixedRows(
            [self.stores[source.path] for source in settings.data],
            [source.weight for source in settings.data],
            rows=max(1, round(settings.tokens / settings.batch_tokens)) * settings.rows_per_step,
            seed=settings.seed,
        )
        steps = len(rows) // settings.rows_per_step
        settings = Settings(**asdict_shallow(settings) | {"evaluate_every": max(1, steps // points)})
        folder = self.work / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.reset_peak_memory_stats() if self.world.device.type == "cuda" else None
        trainer = build_trainer(settings, self.world, self.models, rows, folder, self.log)
        heldout = {text: self.stores[text] for text in HELDOUT if text in self.stores}
        curve = Curve(trainer, heldout, settings, folder, self.log)
        clock = Clock(settings.batch_tokens)
        trainer.add_callback(curve)
        trainer.add_callback(clock)
        problem = None
        try:
            trainer.train()
        except ValueError as error:  # a run that diverges is a result too
            problem = str(error)
        result = {
            "name": name,
            "wiring": wiring,
            "tokens": steps * settings.batch_tokens,
            "tokens_per_second": clock.rate(),
            "seconds": clock.total(),
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if self.world.device.type == "cuda" else None,
            "settings": {key: value for key, value in asdict(settings).items() if key not in ("student", "teacher", "out")},
            "before": curve.before,
            "after": {text: trainer.measure(store, final_rows) for text, store in heldout.items()} if not problem else {},
            "curve": curve.points,
            "log": [entry for entry in trainer.state.log_history if "loss" in entry],
            "problem": problem,
        }
        if keep and not problem:
            target = self.work / name
            save_result(trainer, settings, target, self.world)
            result["weights"] = str(target)
        detach(student)
        self.record["runs"].append(result)
        self.write()
        self.log(f"{name}: {result['tokens']:,} tokens, {result['tokens_per_second']:,.0f}/s, {brief(result)}")
        return result

    def write(self) -> None:
        scratch = self.file.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.record) + "\n", encoding="utf-8")
        scratch.rename(self.file)

    def log(self, line: str) -> None:
        print(f"[{time.monotonic() - START:6.1f}] {line}", flush=True)


class Clock:
    """Time of the steps alone, without measurements and compilation. A Trainer callback."""

    def __new__(cls, tokens: int) -> Any:
        from transformers import TrainerCallback

        class Timing(TrainerCallback):
            def __init__(self) -> None:
                self.marks: list[tuple[float, int]] = []
                self.began = time.monotonic()

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if logs and "loss" in logs:
                    self.marks.append((time.monotonic(), state.global_step))

            def rate(self) -> float:
                """The fastest stretch between two logs of a run (the others hold a measurement or a compilation)."""
                pairs = zip(self.marks, self.marks[1:], strict=False)
                return max(((b[1] - a[1]) * tokens / (b[0] - a[0]) for a, b in pairs), default=0.0)

            def total(self) -> float:
                return time.monotonic() - self.began

        return Timing()


def asdict_shallow(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def brief(result: dict[str, Any]) -> str:
    if result["problem"]:
        return result["problem"]
    return ", ".join(
        f"{text} {result['before'][text]['loss']:.3f} -> {values['loss']:.4f} (KL {values.get('kl', float('nan')):.4f})"
        for text, values in result["after"].items()
    )


def load_rows(path: Path) -> RowStore:
    ids = np.load(path)
    use = path.with_name(path.name.removesuffix(".npy") + ".use.npy")
    return RowStore(ids, np.load(use) if use.exists() else np.full(ids.shape, LEARN, np.uint8))


def sample_rows(
    model: Path, path: Path, world: World, tokens: int, batch: int, length: int, seed: int, sequence: int
) -> dict[str, Any]:
    """Batches of samples, plain and chat, until there are ``tokens``; packed like documents."""
    from ladder_residual.corpus.sample import Sampler, SampleSettings, load_for_sampling

    began = time.monotonic()
    network, tokenizer = load_for_sampling(str(model), world, "bf16")
    start = "mixed" if tokenizer.chat_template else "plain"
    settings = SampleSettings(tokens=tokens, batch=batch, length=length, seed=seed, start=start, random_first=True, write="ids")
    sampler = Sampler(network, tokenizer, settings)
    stream: list[int] = []
    samples = 0
    for drawn in sampler.batches():
        for sample in drawn:
            stream += sample.ids if sample.ids[-1] == sampler.end else [*sample.ids, sampler.end]
        samples += len(drawn)
        if len(stream) >= tokens:
            break
    rows = np.asarray(stream[: len(stream) // sequence * sequence], np.uint16).reshape(-1, sequence)
    np.save(path, rows)
    seconds = time.monotonic() - began
    return {"tokens": len(stream), "samples": samples, "seconds": seconds, "tokens_per_second": len(stream) / seconds}


def conditions(world: World) -> dict[str, Any]:
    import transformers

    device = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def pilot(bench: Bench, seconds: float, million: int, batch: int, length: int) -> None:
    """Speed, memory, and learning rates, most informative first."""
    bench.draw_samples(1, batch=batch, length=length)
    bench.load()
    half = bench.last(1 / 2)
    bench.run("speed, last 15", half, tokens=1 * million, learning_rate=6e-4, points=1)
    all_probes = dict(tokens=2 * million, points=2, warmup=0.05)
    probes = [
        ("all, adamw 1e-3", "ladder", dict(learning_rate=1e-3) | all_probes),
        ("all, muon 2e-3", "ladder", dict(learning_rate=2e-3, optimizer="muon") | all_probes),
        (
            "all, muon 2e-3, hidden 1",
            "ladder",
            dict(learning_rate=2e-3, optimizer="muon", hidden_weight=1.0, hidden_share=0.8) | all_probes,
        ),
        ("all, muon 5e-3", "ladder", dict(learning_rate=5e-3, optimizer="muon") | all_probes),
        (
            "all, muon 2e-3, 16k",
            "ladder",
            dict(learning_rate=2e-3, optimizer="muon", batch_tokens=bench.sequence * ROWS // 2) | all_probes,
        ),
        ("all, adamw 2e-3", "ladder", dict(learning_rate=2e-3) | all_probes),
        ("15, muon 5e-4", half, dict(learning_rate=5e-4, optimizer="muon") | all_probes),
        ("15, muon 1.5e-3", half, dict(learning_rate=1.5e-3, optimizer="muon") | all_probes),
        ("15, adamw 6e-4", half, dict(learning_rate=6e-4) | all_probes),
        (
            "all, muon 2e-3, stages",
            "ladder",
            dict(learning_rate=2e-3, optimizer="muon", stages=bench.stages((0.4, 0.3, 0.2, 0.14, 0.07, 0.04)), stages_share=0.6)
            | all_probes,
        ),
        ("all, adamw 1e-3, hidden 1", "ladder", dict(learning_rate=1e-3, hidden_weight=1.0, hidden_share=0.8) | all_probes),
    ]
    for name, wiring, changes in probes:
        if time.monotonic() - START > seconds:
            bench.log(f"no time for {name} and what follows")
            break
        bench.run(name, wiring, final_rows=64, **changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("pilot", "heal"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no further run after this")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--million", type=int, default=1_000_000, help="less than a million, to try the script itself")
    parser.add_argument("--batch", type=int, default=2048, help="samples drawn side by side")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    with distributed(arguments.device) as world:
        bench = Bench(
            arguments.model, arguments.rows, arguments.work, arguments.out, world, arguments.part, not arguments.no_compile
        )
        if arguments.part == "pilot":
            pilot(bench, arguments.seconds, arguments.million, arguments.batch, arguments.length)
        bench.log("done")


if __name__ == "__main__":
    main()
