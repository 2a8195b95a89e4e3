"""``ladder adapt``: from settings to a healed checkpoint.

The result appears whole, in a directory of its own; everything that belongs to the run itself (packed rows, checkpoints, logs)
stands beside it in ``OUT.training``.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..checkpoint import Checkpoint, read_json, resolve
from ..convert import rewired_config
from ..families import family_of
from ..hf_config import wiring_of
from ..parallel import World
from .building import build_trainer, load_models, tensorboard
from .objective import detach
from .rows import Encoder, MixedRows, RowStore, build_rows, open_sources
from .settings import Settings
from .trainer import AdaptTrainer, last_checkpoint

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
)


@dataclass(frozen=True)
class Result:
    """What a run did."""

    output: Path
    steps: int
    tokens: int
    seconds: float
    before: dict[str, dict[str, float]]
    after: dict[str, dict[str, float]]
    curve: list[dict[str, Any]]


def adapt(settings: Settings, world: World, tell: Callable[[str], None] = print) -> Result:
    """Run it. Every rank calls this; rank 0 tells and writes."""
    tell = tell if world.is_main else (lambda line: None)
    output = settings.output.resolve()
    folder = output.with_name(output.name + ".training")
    check_output(settings, output)
    tokenizer = student_tokenizer(settings.student)
    config = read_json(resolve(settings.student, weights=False) / "config.json")
    check_teacher(settings, config)
    check_context(settings, config)
    encoder = Encoder(tokenizer, int(config["vocab_size"]), answers_only=settings.answers_only)
    begin_folder(settings, folder, world)

    def packed() -> tuple[list[RowStore], dict[str, RowStore]]:
        """Billions of tokens take longer than ranks may wait for each other: rank 0 packs, the others find the rows on disk."""
        stores = open_sources(settings, encoder, folder / "rows", tell)
        most = settings.evaluate_rows
        texts = {
            Path(name).name: build_rows(name, encoder, settings.sequence, folder / "rows", too_long="split", most=most)
            for name in settings.heldout
        }
        return stores, texts

    stores, heldout = world.main_first(packed)
    rows = settings_rows(settings, stores)
    trainer = build_trainer(settings, world, load_models(settings, world), rows, folder, tell)
    curve = Curve(trainer, heldout, settings, folder, tell)
    for callback in (curve, *tensorboard(folder, world)):
        trainer.add_callback(callback)
    resume = last_checkpoint(folder) if settings.resume else None
    if resume is not None:
        tell(f"resume   {resume}")
    outcome = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    trainer.check_finite()
    curve.finish()
    save_result(trainer, settings, output, world)
    tell(f"written  {output}")
    return Result(
        output,
        outcome.global_step,
        outcome.global_step * settings.batch_tokens,
        outcome.metrics["train_runtime"],
        curve.before,
        curve.after,
        curve.points,
    )


def check_output(settings: Settings, output: Path) -> None:
    for name in (settings.student, settings.teacher):
        if name is not None and Path(name).resolve() == output:
            raise ValueError(f"the result would replace {output}, which this run reads; choose another --out")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not empty; choose another --out or delete it")
    if not settings.data:
        raise ValueError("no data: give --data FILE (or owner/name of a hub dataset)")


def student_tokenizer(source: str) -> Any:
    from ..corpus.tokens import read_tokenizer

    return read_tokenizer(source)


def check_teacher(settings: Settings, student: dict[str, Any]) -> None:
    """A teacher with another vocabulary gives distributions over other words."""
    if settings.teacher is None:
        return
    from ..corpus.tokens import read_tokenizer, tokenizer_digest

    teacher = read_json(resolve(settings.teacher, weights=False) / "config.json")
    if teacher.get("vocab_size") != student.get("vocab_size"):
        raise ValueError(
            f"teacher {settings.teacher} has a vocabulary of {teacher.get('vocab_size')}, student {settings.student} one of "
            f"{student.get('vocab_size')}: distillation compares distributions over the same words"
        )
    digests = [tokenizer_digest(read_tokenizer(source)) for source in (settings.teacher, settings.student)]
    if digests[0] != digests[1]:
        raise ValueError(
            f"teacher {settings.teacher} and student {settings.student} have different tokenizers: the same number means different "
            f"words; convert the student from this teacher (ladder convert)"
        )
    matched = ("hidden_size", "num_hidden_layers") if settings.hidden_weight or settings.control else ()
    for name in matched:
        if teacher.get(name) != student.get(name):
            raise ValueError(
                f"matching hidden states needs models of one shape, but {name} is {teacher.get(name)} in the teacher and "
                f"{student.get(name)} in the student; use hidden_weight = 0"
            )


def check_context(settings: Settings, config: dict[str, Any]) -> None:
    context = config.get("max_position_embeddings")
    if context and settings.sequence > context:
        raise ValueError(f"sequence={settings.sequence} is longer than the model's context of {context}; use at most that")


def begin_folder(settings: Settings, folder: Path, world: World) -> None:
    """A folder of an earlier run is continued only if that run was the same."""
    if world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        ours = {key: value for key, value in asdict(settings).items() if key not in _NOT_PART_OF_THE_RUN}
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
            (folder / "log.jsonl").unlink(missing_ok=True)
        path.write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")
    world.barrier()


def settings_rows(settings: Settings, stores: list[RowStore]) -> MixedRows:
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
    """Measures the held-out texts before, during and after; keeps ``log.jsonl``."""

    def __init__(
        self, trainer: AdaptTrainer, heldout: dict[str, RowStore], settings: Settings, folder: Path, tell: Callable[[str], None]
    ) -> None:
        self.trainer, self.heldout, self.settings, self.folder, self.tell = trainer, heldout, settings, folder, tell
        self.points: list[dict[str, Any]] = []
        self.before: dict[str, dict[str, float]] = {}
        self.after: dict[str, dict[str, float]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.before = self.measure(0)

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
            self.points.append({"step": step, "tokens": step * self.settings.batch_tokens, "texts": texts})
            self.tell(f"step {step:>6}  " + "  ".join(f"{name} {result['loss']:.4f}" for name, result in texts.items()))
        return texts


def save_result(trainer: AdaptTrainer, settings: Settings, output: Path, world: World) -> None:
    """Plain weights in the student's own precision, tokenizer and config: a checkpoint like the one that came in."""
    from .sharded import whole_weights

    student = trainer.inner
    if settings.method == "lora":
        adapters: Any = trainer.model
        adapters.merge_and_unload()
    detach(student)
    weights = whole_weights(student) if trainer.sharded else dict(student.state_dict())
    if world.is_main:
        source = resolve(settings.student)
        checkpoint = Checkpoint(source)
        stored = {"BF16": torch.bfloat16, "F16": torch.float16}.get(checkpoint.dtype(), torch.float32)
        checkpoint.close()
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            scratch.chmod(0o755)
            student.config.dtype = stored
            weights = {name: tensor.to(stored) for name, tensor in weights.items()}
            student.save_pretrained(scratch, state_dict=weights)
            config = read_json(scratch / "config.json")
            config["use_cache"] = read_json(source / "config.json").get("use_cache", True)  # the Trainer switched it off
            written = rewired_config(config, family_of(config), wiring_of(student.config))
            (scratch / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
            for path in source.iterdir():  # tokenizer, chat template, notices
                along = path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model", ".md")
                if along and not (scratch / path.name).exists() and not path.name.startswith("model.safetensors"):
                    shutil.copyfile(path, scratch / path.name)
            if output.exists():
                output.rmdir()
            scratch.rename(output)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    world.barrier()
