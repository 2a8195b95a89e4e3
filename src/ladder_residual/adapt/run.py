"""``ladder adapt``: from settings to a recovered checkpoint.

The result appears whole, in a directory of its own; everything that belongs to the run itself (packed rows, checkpoints, logs)
stands beside it in ``OUT.training``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..common.files import replace_text
from ..data.encoder import Encoder
from ..data.packing import MixedRows, RowStore, build_mixture, build_rows
from ..data.tokenizer import read_tokenizer, tokenizer_digest
from ..distributed.world import DEFAULT_TIMEOUT_SECONDS, World
from ..models.checkpoint_reader import read_json, resolve
from ..models.quantization.linear import holds_quantised
from ..train.logs import drop_beyond, read_events
from ..train.run_lock import run_lock
from ..train.stop_signal import StopSignal, ignoring_interrupts
from .build import build_trainer, load_models, tensorboard
from .checkpoints import checkpoint_to_resume, last_checkpoint, what_is_kept
from .outcome import compared, hold_out, sentences, share_seen
from .preflight import check_settings
from .saving import save_result
from .settings import AdaptSettings
from .trainer import AdaptTrainer, StopOnSignal

HELDOUT_LOG = "heldout.jsonl"  # a line for each measurement
_NOT_PART_OF_THE_RUN = (
    "resume",
    "log_every",
    "save_every",
    "keep",
    "evaluate_every",
    "evaluate_tokens",
    "heldout",
    "compile",
    "progress",
    "merge",
)


@dataclass(frozen=True)
class Result:
    """What a run did, and whether it helped (``sentences``)."""

    output: Path
    steps: int
    tokens: int
    seconds: float
    before: dict[str, dict[str, float]]
    after: dict[str, dict[str, float]]
    curve: list[dict[str, Any]]
    texts: dict[str, dict[str, float | None]]  # by held-out text (outcome.compared)
    share_of_text_percent: float  # of the rows there are, how many were trained on
    stopped: bool = False  # by SIGTERM: there is a checkpoint, and no output yet

    def sentences(self) -> list[str]:
        return sentences(self.texts)


def adapt(settings: AdaptSettings, world: World, log: Callable[[str], None] = print) -> Result:
    """Run it. Every rank calls this; rank 0 tells and writes."""
    log = log if world.is_main else (lambda line: None)
    output = settings.output.resolve()
    folder = output.with_name(output.name + ".training")
    check_settings(settings)
    tokenizer = read_tokenizer(settings.student)
    check_tokenizers(settings)
    config = read_json(resolve(settings.student, weights=False) / "config.json")
    encoder = Encoder(tokenizer, int(config["vocab_size"]), answers_only=settings.answers_only)
    with run_lock(folder, world):
        return _adapt(settings, world, encoder, folder, log)


def _adapt(settings: AdaptSettings, world: World, encoder: Encoder, folder: Path, log: Callable[[str], None]) -> Result:
    begin_folder(settings, folder, world)

    def packed() -> tuple[list[RowStore], dict[str, RowStore]]:
        """Billions of tokens take longer than ranks may wait for each other: rank 0 packs, the others find the rows on disk."""
        paths, weights = zip(*((source.path, source.weight) for source in settings.data), strict=True)
        rows, sequence, kept = settings.rows, settings.sequence, folder / "rows"
        stores = build_mixture(
            paths, weights, encoder, sequence, kept, rows=rows, too_long=settings.too_long, seed=settings.seed
        )
        for path, store in zip(paths, stores, strict=True):
            log(f"data     {path}: {len(store):,} rows of {sequence} tokens")
        limit = settings.evaluate_rows
        texts = {
            Path(name).name: build_rows(name, encoder, sequence, kept, too_long="split", limit=limit)
            for name in settings.heldout
        }
        return stores, texts

    stores, heldout = world.main_first(packed)
    every = list(stores)
    if not heldout:
        named = {Path(source.path).name: store for source, store in zip(settings.data, stores, strict=True)}
        # Two sources of one name would be one text: those are measured by --heldout only.
        if len(named) == len(stores):
            at_most, needed = settings.evaluate_rows, max(settings.rows_per_step, len(stores))
            stores, heldout = hold_out(named, settings.holdout, at_most=at_most, needed=needed)
        for name, held in heldout.items():
            log(f"heldout  {name}: {len(held):,} of {len(named[name]):,} rows are measured on and never trained on")
    rows = settings_rows(settings, stores)
    trainer = build_trainer(settings, world, load_models(settings, world), rows, folder, log)
    curve, stop = Curve(trainer, heldout, settings, folder, log), StopSignal(world, DEFAULT_TIMEOUT_SECONDS)
    for callback in (StopOnSignal(stop), curve):
        trainer.add_callback(callback)
    resume = checkpoint_to_resume(folder, world, log) if settings.resume else None
    if resume is not None:
        log(f"resume   {resume}")
    try:
        with stop, tensorboard(folder, world) as curves:
            if curves is not None:
                trainer.add_callback(curves)
            outcome = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
            stopped = stop.agreed
    except KeyboardInterrupt:
        with ignoring_interrupts():
            log(f"interrupted after step {trainer.state.global_step}: {what_is_kept(folder)}")
        raise
    trainer.check_finite()
    output, share = settings.output.resolve(), share_seen(rows, every)
    if stopped:
        log(f"stopped  by SIGTERM after step {outcome.global_step}: {what_is_kept(folder)}")
    else:
        curve.finish()
    result = Result(
        output,
        outcome.global_step,
        outcome.global_step * settings.batch_tokens,
        outcome.metrics["train_runtime"],
        curve.before,
        curve.after,
        curve.points,
        compared(curve.before, curve.after, curve.teacher),
        share,
        stopped,
    )
    if not stopped:
        save_result(trainer, settings, output, world, result_document(result, settings))
        if settings.merge and holds_quantised(trainer.inner):
            log("written as an adapter, because the base is quantised")
        log(f"written  {output}")
    return result


def check_tokenizers(settings: AdaptSettings) -> None:
    if settings.teacher is None:
        return
    digests = [tokenizer_digest(read_tokenizer(source)) for source in (settings.teacher, settings.student)]
    if digests[0] != digests[1]:
        raise ValueError(
            f"teacher {settings.teacher} and student {settings.student} have different tokenizers: the same number means different "
            f"words; convert the student from this teacher (ladder convert)"
        )


def begin_folder(settings: AdaptSettings, folder: Path, world: World) -> None:
    """A folder of an earlier run is continued only if that run was the same."""
    if world.is_main:
        ours = {key: value for key, value in asdict(settings).items() if key not in _NOT_PART_OF_THE_RUN}
        ours["holdout"] = 0.0 if settings.heldout else settings.holdout  # decides which rows are trained on
        ours = json.loads(json.dumps(ours))
        path = folder / "settings.json"
        if settings.resume and last_checkpoint(folder) is not None and path.exists():
            theirs = read_json(path)
            different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
            if different:
                raise ValueError(
                    f"{folder} holds a run with other settings ({', '.join(different)}); use the same ones, another --out, or "
                    f"--no-resume to begin again"
                )
        elif not settings.resume:
            for old in folder.glob("checkpoint-*"):
                shutil.rmtree(old)
            for old in (folder / "log.jsonl", folder / HELDOUT_LOG):
                old.unlink(missing_ok=True)
        replace_text(path, json.dumps(ours, indent=2) + "\n")
    world.barrier()


def settings_rows(settings: AdaptSettings, stores: list[RowStore]) -> MixedRows:
    weights = [source.weight for source in settings.data]
    mixed = MixedRows(stores, weights, rows=settings.rows, epochs=settings.epochs, seed=settings.seed)
    if len(mixed) < settings.rows_per_step:
        raise ValueError(
            f"the data gives {len(mixed)} rows of {settings.sequence} tokens, less than one step of {settings.rows_per_step}; use a "
            f"smaller batch_tokens (now {settings.batch_tokens}) or more data"
        )
    mixed.order = mixed.order[: len(mixed) // settings.rows_per_step * settings.rows_per_step]  # whole steps only
    return mixed


class Curve(TrainerCallback):
    """Measures the held-out texts before, during and after; keeps ``log.jsonl``, and the points for a run that is resumed."""

    def __init__(
        self,
        trainer: AdaptTrainer,
        heldout: dict[str, RowStore],
        settings: AdaptSettings,
        folder: Path,
        log: Callable[[str], None],
    ) -> None:
        self.trainer, self.heldout, self.settings, self.folder, self.log = trainer, heldout, settings, folder, log
        self.points: list[dict[str, Any]] = []
        self.before: dict[str, dict[str, float]] = {}
        self.after: dict[str, dict[str, float]] = {}
        self.teacher: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, store in self.heldout.items():
            if (loss := self.trainer.measure_teacher(store, self.settings.evaluate_rows)) is not None:
                self.teacher[name] = loss
        kept = self.folder / HELDOUT_LOG
        if state.global_step == 0:
            if state.is_world_process_zero:
                kept.unlink(missing_ok=True)
            self.before = self.measure(0)
        elif kept.exists():
            if state.is_world_process_zero:
                drop_beyond(kept, state.global_step)
            self.points = [point for point in read_events(kept) if point["step"] <= state.global_step and "texts" in point]
            self.before = self.points[0]["texts"] if self.points and self.points[0]["step"] == 0 else {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        every = self.settings.evaluate_every
        if every and state.global_step % every == 0 and state.global_step < state.max_steps:
            self.measure(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as sink:
                print(json.dumps({"step": state.global_step, **logs}), file=sink)

    def finish(self) -> None:
        self.after = self.measure(self.trainer.state.global_step)

    def measure(self, step: int) -> dict[str, dict[str, float]]:
        rows = self.settings.evaluate_rows
        texts = {name: self.trainer.measure(store, rows) for name, store in self.heldout.items()}
        if texts:
            point = {"step": step, "tokens": step * self.settings.batch_tokens, "texts": texts}
            self.points.append(point)
            if self.trainer.args.should_save:
                with (self.folder / HELDOUT_LOG).open("a", encoding="utf-8") as sink:
                    print(json.dumps(point), file=sink)
            self.log(f"step {step:>6}  " + "  ".join(f"{name} {result['loss']:.4f}" for name, result in texts.items()))
        return texts


def result_document(result: Result, settings: AdaptSettings) -> dict[str, Any]:
    """``adapt.json`` in the recovered checkpoint, which ``ladder report`` reads."""
    return {
        "kind": "adapt",
        "student": Path(settings.student).name,
        "teacher": Path(settings.teacher).name if settings.teacher else None,
        "method": settings.method,
        "steps": result.steps,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "share_of_text_percent": result.share_of_text_percent,
        "texts": result.texts,
        "curve": result.curve,
    }
