"""What the runs of ``adapt_smollm2.py`` share: models compiled once, texts, one record, scores and a few spoken words."""

from __future__ import annotations

import gc
import gzip
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ladder_residual.adapt.build import build_trainer, load_models
from ladder_residual.adapt.objective import restore_forward
from ladder_residual.adapt.run import Curve
from ladder_residual.adapt.saving import save_result
from ladder_residual.adapt.settings import AdaptSettings, DataSource
from ladder_residual.common.environment import environment
from ladder_residual.data.encoder import LEARN
from ladder_residual.data.packing import MixedRows, RowStore
from ladder_residual.distributed.world import World
from ladder_residual.models.hf import EAGER, decoder_layers, rewire
from ladder_residual.train.compile import compile_layers

SOURCES = (DataSource("books", 0.3), DataSource("samples", 0.5), DataSource("reference", 0.1), DataSource("gsm8k", 0.1))
HELDOUT = ("books_heldout", "wikitext2", "samples_heldout")
MODEL = "SmolLM2-135M-Instruct (4-bit weights, dequantised)"
START = time.monotonic()


class Bench:
    """One student and one teacher, compiled once and used by every run: weights and wiring are put back in between."""

    def __init__(
        self,
        model: Path,
        rows: Path,
        work: Path,
        out: Path,
        world: World,
        name: str,
        step_rows: int,
        compile: bool,
        graphs: bool,
    ) -> None:
        self.step_rows = step_rows
        self.model, self.work, self.out, self.world = model, work, out, world
        work.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / f"{name}.json"
        self.stores = {
            path.name.removesuffix(".npy"): load_rows(path) for path in rows.glob("*.npy") if ".use" not in path.name
        }
        self.fine_tuned: dict[str, torch.Tensor] = {}
        self.fine_tuned_tokens = 0
        self.talking: list[subprocess.Popen[bytes]] = []
        self.compile, self.graphs = compile, graphs and world.device.type == "cuda"
        self.sequence = next(iter(self.stores.values())).ids.shape[1]
        self.layers = json.loads((model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
        self.record: dict[str, Any] = {"benchmark": f"adapt {name}", "model": MODEL, **conditions(world), "runs": []}
        self.kept = work / f"{name}.json"  # a second call goes on where the first ended
        if self.kept.exists():
            self.record = json.loads(self.kept.read_text(encoding="utf-8"))

    def draw_samples(self, tokens: int, batch: int, length: int) -> None:
        """The model's own samples: begun like documents with a random word, and chats it holds with itself."""
        for name, seed, amount, side in (("samples", 0, tokens, batch), ("samples_heldout", 10_000, 1, max(64, batch // 8))):
            path = self.work / f"{name}-{amount}.npy"
            if not path.exists():
                self.record[f"drawing {name}"] = sample_rows(
                    self.model, path, self.world, amount, side, length, seed, self.sequence
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
        settings = self.settings("ladder", tokens=self.sequence * self.step_rows)
        self.models = load_models(settings, self.world)
        if self.compile:
            compile_layers(self.models.student)
        self.compute = decoder_layers(self.models.student)[0].compute
        self.original = {name: tensor.detach().clone() for name, tensor in self.models.student.state_dict().items()}
        self.log(f"models loaded in {time.monotonic() - began:.1f} s")

    def load_fine_tuned_teacher(self, weights: Path, tokens: int) -> None:
        """Runs marked ``fine_tuned`` learn from, and begin with, weights that were trained on the same text first."""
        from safetensors.torch import load_file

        self.fine_tuned = load_file(weights / "model.safetensors", device=str(self.world.device))
        self.fine_tuned_tokens = tokens

    def measure_original(self) -> None:
        """The unchanged model on the held-out texts: what recovery aims at."""
        if "original" in self.record:
            return
        rewire(self.models.student, "standard")
        settings = self.settings("standard", tokens=self.step_rows * self.sequence)
        rows = MixedRows([self.stores["books"]], [1.0], rows=self.step_rows)
        trainer = build_trainer(settings, self.world, self.models, rows, self.work, self.log)
        self.record["original"] = {text: trainer.measure(self.stores[text], 256) for text in HELDOUT}
        restore_forward(self.models.student)
        self.log(f"original: {self.record['original']}")

    def settings(self, wiring: str, **changes: Any) -> AdaptSettings:
        defaults: dict[str, Any] = dict(
            student=str(self.model),
            teacher=str(self.model),
            out=str(self.work / "unused"),
            data=SOURCES,
            sequence=self.sequence,
            batch_tokens=self.step_rows * self.sequence,
            compile=self.compile,
            graphs=self.graphs,
            evaluate_tokens=64 * self.sequence,
            progress=False,
            log_every=20,
        )
        return AdaptSettings(**defaults | changes)

    def run(
        self,
        name: str,
        wiring: str,
        *,
        points: int = 6,
        keep: bool = False,
        eager: bool = False,
        final_rows: int = 256,
        fine_tuned: bool = False,
        **changes: Any,
    ) -> dict[str, Any]:
        settings = self.settings(wiring, **changes)
        student = self.models.student
        layers: list[Any] = list(decoder_layers(student))
        for layer in layers:
            layer.compute = EAGER if eager else self.compute
        if eager:
            settings = replace(settings, compile=False, graphs=False)
        restore_forward(student)
        put(student, self.original)
        assert self.models.teacher is not None
        put(self.models.teacher, self.fine_tuned if fine_tuned else self.original)
        rewire(student, wiring)
        assert settings.tokens is not None
        rows = MixedRows(
            [self.stores[source.path] for source in settings.data],
            [source.weight for source in settings.data],
            rows=max(1, round(settings.tokens / settings.batch_tokens)) * settings.rows_per_step,
            seed=settings.seed,
        )
        steps = len(rows) // settings.rows_per_step
        settings = replace(settings, evaluate_every=max(1, steps // points))
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
        before = {text: trainer.measure(store, final_rows) for text, store in heldout.items()}
        if fine_tuned:
            put(student, self.fine_tuned)  # measured before as zero-shot: the original's weights
        try:
            trainer.train()
            if curve.points and curve.points[-1]["step"] != trainer.state.global_step:
                curve.finish()
        except ValueError as error:  # a run that diverges is a result too
            problem = str(error)
        result = {
            "name": name,
            **{key: value for key, value in environment().items() if key in ("commit", "date")},  # a record grows over days
            "wiring": wiring,
            "tokens": steps * settings.batch_tokens,
            "fine_tuned_teacher_tokens": self.fine_tuned_tokens if fine_tuned else 0,
            "tokens_per_second": clock.rate(),
            "seconds": clock.total(),
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if self.world.device.type == "cuda" else None,
            "settings": {key: value for key, value in asdict(settings).items() if key not in ("student", "teacher", "out")},
            "before": before,
            "after": {text: trainer.measure(store, final_rows) for text, store in heldout.items()} if not problem else {},
            "to_original": self.distance(settings, rows, folder, heldout, final_rows) if not problem else {},
            "curve": curve.points,
            "graphs": trainer.graphed is not None,
            "log": [entry for entry in trainer.state.log_history if "loss" in entry],
            "problem": problem,
        }
        if keep and not problem:
            target = self.work / "recovered" / name
            shutil.rmtree(target, ignore_errors=True)
            save_result(trainer, settings, target, self.world)
            result["weights"] = str(target)
        restore_forward(student)
        if settings.method == "lora":  # the student is the next run's too
            peft: Any = trainer.model
            peft.unload()
            student.requires_grad_(True)
        trainer.graphed = None
        del trainer
        gc.collect()  # the recorded step holds its memory as long as anything points to it
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self.record["runs"].append(result)
        self.write()
        self.log(f"{name}: {result['tokens']:,} tokens, {result['tokens_per_second']:,.0f}/s, {brief(result)}")
        return result

    def distance(
        self, settings: AdaptSettings, rows: Any, folder: Path, texts: dict[str, RowStore], count: int
    ) -> dict[str, float]:
        """KL of the student from the original, whoever taught it: what next-token training is measured by too."""
        assert self.models.teacher is not None
        put(self.models.teacher, self.original)
        settings = replace(settings, method="distill", hidden_weight=0.0, stages=(), graphs=False)
        measuring = build_trainer(settings, self.world, self.models, rows, folder, lambda line: None)
        return {text: measuring.measure(store, count)["kl"] for text, store in texts.items()}

    def done(self, name: str) -> bool:
        return any(run["name"] == name for run in self.record["runs"])

    def write(self) -> None:
        for path in (self.file, self.kept):
            scratch = path.with_suffix(".tmp")
            scratch.write_text(json.dumps(self.record) + "\n", encoding="utf-8")
            scratch.rename(path)

    def log(self, line: str) -> None:
        print(f"[{time.monotonic() - START:6.1f}] {line}", flush=True)


def put(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """In place: compiled code goes on with the new values. A head that shares the embedding's weights is not in a file."""
    odd = model.load_state_dict(weights, strict=False)
    if odd.unexpected_keys or set(odd.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"these weights are another model's: {odd}")


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


def brief(result: dict[str, Any]) -> str:
    if result["problem"]:
        return result["problem"]
    return ", ".join(
        f"{text} {result['before'][text]['loss']:.3f} -> {values['loss']:.4f} (KL {result['to_original'][text]:.4f})"
        for text, values in result["after"].items()
    )


def load_rows(path: Path) -> RowStore:
    ids = np.load(path)
    use = path.with_name(path.name.removesuffix(".npy") + ".use.npy")
    if use.exists():
        return RowStore(ids, np.load(use), padded=True)
    return RowStore(ids, np.full(ids.shape, LEARN, np.uint8))


def sample_rows(
    model: Path, path: Path, world: World, tokens: int, batch: int, length: int, seed: int, sequence: int
) -> dict[str, Any]:
    """Batches of samples, plain and chat, until there are ``tokens``; packed like documents."""
    from ladder_residual.data.sample import Sampler, SampleSettings, load_for_sampling

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
    return {"device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu", **environment()}


def selection(bench: Bench) -> dict[str, Any]:
    """Layers chosen on books and the model's samples; the curves also on texts that had no say."""
    from ladder_residual.adapt.probe import Probe
    from ladder_residual.adapt.select import curves, select
    from ladder_residual.models.loading import load_model

    began = time.monotonic()
    model = load_model(str(bench.model), bench.world, dtype="bf16" if bench.world.device.type == "cuda" else "fp32")
    take = min(8, len(bench.stores["samples"]))
    texts = {"calibration": np.concatenate([bench.stores["books"].ids[: 2 * take : 2], bench.stores["samples"].ids[:take]])}
    texts |= {name: bench.stores[name].ids[: 2 * take] for name in HELDOUT}
    found: dict[str, Any] = {"curves": {}, "original": {}}
    choice = None
    for name, ids in texts.items():
        probe = Probe(model, torch.from_numpy(ids.astype(np.int64)), batch=8)
        if choice is None:
            choice = select(probe, width=8)
            found["single"] = [{"layer": layer, "loss": cost.loss, "kl": cost.kl} for layer, cost in enumerate(choice.single)]
            found["chosen"] = [
                {"k": k, "layers": list(cost.layers), "why": choice.reasons[k]} for k, cost in choice.chosen.items()
            ]
        found["curves"][name] = curves(probe, choice)
        found["original"][name] = probe.original.loss
        bench.log(f"selection on {name}: {time.monotonic() - began:.1f} s, {probe.passes:.0f} passes")
    found |= {"tokens": int(texts["calibration"].size), "seconds": time.monotonic() - began}
    return found


class Scoring:
    """Answers to the evaluation's requests by each model, gathered in one file."""

    def __init__(self, bench: Bench, requests: Path | None) -> None:
        self.bench, self.requests = bench, requests
        self.kept = bench.work / "scores.json"
        self.scores: dict[str, Any] = json.loads(self.kept.read_text(encoding="utf-8")) if self.kept.exists() else {}

    def model(self, name: str, directory: Path, wiring: str | None) -> None:
        if self.requests is None or name in self.scores:
            return
        from ladder_residual.evaluate.requests import Requests
        from ladder_residual.evaluate.score import score_all
        from ladder_residual.models.loading import load_model

        began = time.monotonic()
        network = load_model(str(directory), self.bench.world, wiring=wiring, dtype="bf16")
        found = score_all(network, Requests.load(self.requests))
        path = self.bench.work / "one.json"
        found.save(path)
        self.scores[name] = json.loads(path.read_text(encoding="utf-8"))
        self.kept.write_text(json.dumps(self.scores), encoding="utf-8")
        with gzip.open(self.bench.out / "scores.json.gz", "wt", encoding="utf-8") as sink:
            json.dump(self.scores, sink)
        del network
        self.bench.log(f"scored {name} in {time.monotonic() - began:.1f} s")


def speak(bench: Bench, name: str, directory: Path) -> None:
    """A few words on two CPU ranks, while the GPU goes on."""
    prompts = bench.work / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": text}]}) for text in PROMPTS) + "\n")
    words = [
        "generate",
        str(directory),
        "--file",
        str(prompts),
        "--tp",
        "2",
        "--uneven",
        "--device",
        "cpu",
        "-n",
        "60",
        "--temperature",
        "0",
    ]
    target = bench.out / f"text-{name.replace(',', '').replace(' ', '-')}.jsonl"
    bench.talking.append(subprocess.Popen([sys.executable, "-m", "ladder_residual", *words, "--out", str(target)]))


PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue to a child.",
)
