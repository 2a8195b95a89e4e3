"""The training loop: a recipe in, a run directory out.

    runs/NAME/recipe.json    what was run
    runs/NAME/log.jsonl      losses, speed, evaluations
    runs/NAME/checkpoints/   step-00000100, ... (``checkpoints.py``)
    runs/NAME/export/        a Hugging Face directory, at the end

Every step is a function of the recipe, the weights and the step's number: the rows it reads, its learning rate and its noise (there
is none) need no state of their own. So a run that is killed and started again goes on exactly where its last checkpoint stood.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from torch import Tensor

from ..common.files import replace_text
from ..data.corpus_rows import IGNORE_INDEX, CorpusRows
from .checkpoints import Checkpoints
from .corpora import open_corpus
from .export import export
from .layout import Layout, rows_per_rank, training_layout
from .logs import Logs
from .model import ModelWithLoss, build
from .optimizer import ShardedAdamW
from .recipe import Recipe
from .run_lock import run_lock
from .schedule import lr_share
from .speed import flops_per_token, peak_tflops
from .stop_signal import StopSignal, ignoring_interrupts


class Diverged(ValueError):
    """The loss or the gradient is no number any more."""


def train(recipe: Recipe, *, resume: str = "auto", quiet: bool = False, stop_after: int | None = None) -> dict[str, Any]:
    """Run a recipe on the ranks the launcher started (or on this process alone). Returns the last evaluation and where things are.

    ``resume``: ``auto`` goes on from the newest good checkpoint of the run's directory if there is one, ``never`` starts anew and
    refuses a directory that holds a run. ``stop_after`` ends early after so many steps, as a time limit would. SIGTERM saves a
    checkpoint and ends the run (``stopped`` in the result).
    """
    if resume not in ("auto", "never"):
        raise ValueError(f"resume must be auto or never, got {resume!r}")
    with (
        training_layout(recipe.run.device, recipe.run.timeout, recipe.parallel.tp, recipe.parallel.dp) as layout,
        run_lock(recipe.directory, layout.world),
    ):
        loop = Loop(recipe, layout, resume=resume, quiet=quiet)
        try:
            return loop.run(stop_after)
        except KeyboardInterrupt:
            with ignoring_interrupts():
                loop.checkpoints.close()  # one may still be on its way to the disk
                loop.logs.say(f"interrupted after step {loop.step}: {loop.kept()}")
            raise
        finally:
            loop.close()


class Loop:
    def __init__(self, recipe: Recipe, layout: Layout, *, resume: str, quiet: bool) -> None:
        self.recipe, self.layout = recipe, layout
        self.rows, self.micro_rows = rows_per_rank(recipe.batch.rows, layout.dp, recipe.batch.micro_rows)
        verify = recipe.data.verify if layout.world.is_main else "sizes"  # one rank reads for all
        self.train_rows = open_rows(recipe, "train", shuffle=True, verify=verify)
        self.valid_rows = open_rows(recipe, "valid", shuffle=False, verify=verify) if recipe.data.valid else None
        layout.world.check_software()
        layout.world.check_same("the recipe", json.dumps(recipe.to_dict(), sort_keys=True))
        index = json.dumps(self.train_rows.corpus.index(), sort_keys=True)  # holds the checksums of all shards
        layout.world.check_same("the training data", index)
        # FSDP warns of outputs that are views: nothing here writes into a layer's output.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        torch.manual_seed(recipe.run.seed)
        self.trained: ModelWithLoss = build(recipe, layout)
        self.optimizer = ShardedAdamW(self.trained, recipe.optimizer, layout)
        directory, corpus = recipe.directory, self.train_rows.corpus
        data = hashlib.sha256(index.encode()).hexdigest()
        self.about = {"end_of_document": corpus.end_of_document, "tokenizer": corpus.tokenizer.get("source"), "data": data}
        self.checkpoints = Checkpoints(directory / "checkpoints", layout, keep=recipe.checkpoint.keep)
        if resume == "never" and self.checkpoints.any():
            raise ValueError(
                f"{directory} holds a run already: give another checkpoint.directory, or resume it (--resume auto)"
            )
        self.messages: list[str] = []
        self.step = self.checkpoints.load(self.trained, self.optimizer, recipe, data, self.messages.append)
        self.logs = Logs(recipe, directory, start=self.step, active=layout.world.is_main, quiet=quiet)
        for message in self.messages:
            self.logs.say(message)
        if layout.world.is_main:
            replace_text(directory / "recipe.json", json.dumps(recipe.to_dict(), indent=1))
        self.stop = StopSignal(layout.world, layout.timeout)
        self.prefetch = ThreadPoolExecutor(1)
        self.clock, self.clock_step = time.perf_counter(), self.step
        self.pending: list[tuple[int, Tensor, Tensor]] = []  # (step, loss, norm) on the device, not looked at yet
        shape = recipe.model.shape()
        self.flops = flops_per_token(shape, recipe.data.sequence) * recipe.tokens_per_step
        name = torch.cuda.get_device_name(layout.device) if layout.device.type == "cuda" else "cpu"
        self.peak = recipe.log.peak_tflops or peak_tflops(name)

    def run(self, stop_after: int | None) -> dict[str, Any]:
        recipe, steps = self.recipe, self.recipe.run.steps
        last = steps if stop_after is None else min(steps, self.step + stop_after)
        with self.stop:
            evaluated = self.evaluate() if self.evaluation_left() else {}
            upcoming = self.prefetch.submit(self.batch, self.step)
            self.clock, self.clock_step = time.perf_counter(), self.step
            while self.step < last and not self.stop.requested():
                batch = upcoming.result()
                if self.step + 1 < last:
                    upcoming = self.prefetch.submit(self.batch, self.step + 1)
                loss, norm = self.take_step(batch)
                self.step += 1
                self.pending.append((self.step, loss, norm))
                if _due(self.step, recipe.log.every) or self.step == last:
                    self.report()
                if _due(self.step, recipe.evaluate.every) and self.step < steps:
                    evaluated = self.evaluate()
                if _due(self.step, recipe.checkpoint.every) and self.step < steps:
                    self.save()
            if self.step == steps and not self.stop.agreed:
                evaluated = self.evaluate()
            stopped = self.stop.agreed
            if self.step and (self.step == steps or stopped):
                self.save(final=True)
        if stopped:
            self.logs.say(f"stopped by SIGTERM after step {self.step}: {self.kept()}")
        return self.finish(evaluated, stopped)

    def evaluation_left(self) -> bool:
        """Before the first step if the recipe wants it; after a resumed one if it was cut off."""
        if self.step == 0:
            return self.recipe.evaluate.first
        due = _due(self.step, self.recipe.evaluate.every) and self.step < self.recipe.run.steps
        return due and not self.layout.world.broadcast(self.logs.has("valid", self.step))

    def kept(self) -> str:
        newest = self.checkpoints.newest()
        return f"{newest} is kept, and the same command goes on from there" if newest else "no checkpoint was saved yet"

    def batch(self, step: int) -> dict[str, Tensor]:
        """This rank's rows of a step; all tensor-parallel ranks of a copy read the same ones."""
        batch = self.train_rows.batch(step * self.recipe.batch.rows + self.layout.dp_rank * self.rows, self.rows)
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self.layout.device.type == "cuda" else batch

    def take_step(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        device, dp = self.layout.device, self.layout.dp
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        counted = self.layout.all_reduce_over_data((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
        divisor = counted / dp  # FSDP takes the mean over copies; with this divisor that mean is the mean over all labels
        total = torch.zeros((), device=device)
        micro = {name: tensor.split(self.micro_rows) for name, tensor in batch.items()}
        count = self.rows // self.micro_rows
        fsdp: Any = self.trained
        for index in range(count):
            fsdp.set_requires_gradient_sync(index == count - 1)
            loss = self.trained({name: parts[index] for name, parts in micro.items()}, divisor)
            loss.total.backward()
            total += loss.cross_entropy
        share = lr_share(self.step, self.recipe.run.steps, self.recipe.optimizer)
        norm = self.optimizer.step(self.recipe.optimizer.lr * share)
        return self.layout.all_reduce_over_data(total / dp), norm

    def report(self) -> None:
        """Look at the steps since the last report: the only place where the host waits for the device."""
        losses = torch.stack([loss for _, loss, _ in self.pending]).tolist()
        norms = torch.stack([norm for _, _, norm in self.pending]).tolist()
        for (step, _, _), loss, norm in zip(self.pending, losses, norms, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.checkpoints.wait()  # one may still be on its way to the disk
                newest = self.checkpoints.newest()
                where = f"the newest checkpoint, {newest}, is from before" if newest else "there is no checkpoint yet"
                raise Diverged(
                    f"step {step}: loss {loss}, gradient norm {norm}; stopped. {where}. Lower optimizer.lr or optimizer.clip, "
                    "or look at the data of that step"
                )
        seconds = time.perf_counter() - self.clock
        steps = self.step - self.clock_step
        values: dict[str, Any] = {"loss": losses[-1], "lr": self.optimizer.adamw.param_groups[0]["lr"], "grad_norm": norms[-1]}
        values |= {"losses": losses, "grad_norms": norms}
        values["tokens"] = self.step * self.recipe.tokens_per_step
        values["seconds"] = seconds
        values["tokens_per_s"] = steps * self.recipe.tokens_per_step / seconds
        if self.peak:
            values["mfu"] = steps * self.flops / seconds / (self.peak * 1e12 * self.layout.world.size)
        if self.layout.device.type == "cuda":
            values["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.logs.event("train", self.step, **values)
        self.pending.clear()
        self.clock, self.clock_step = time.perf_counter(), self.step

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss over the validation rows, the same rows every time; each copy of the model takes its share."""
        if self.valid_rows is None:
            return {}
        started = time.perf_counter()
        rows = min(self.recipe.evaluate.rows or self.valid_rows.per_epoch, self.valid_rows.per_epoch)
        totals = torch.zeros(2, dtype=torch.float64, device=self.layout.device)  # sum of losses, number of labels
        self.trained.eval()
        stride = self.micro_rows * self.layout.dp
        for first in range(0, rows, stride):  # all ranks take as many turns; rows beyond the end count for nothing
            if self.stop.requested():
                self.trained.train()
                return {}
            position = first + self.layout.dp_rank * self.micro_rows
            batch = self.valid_rows.batch(position % self.valid_rows.per_epoch, self.micro_rows)
            batch["labels"][max(0, rows - position) :] = IGNORE_INDEX
            moved = {name: tensor.to(self.layout.device) for name, tensor in batch.items()}
            totals[0] += self.trained(moved, 1.0).cross_entropy
            totals[1] += (moved["labels"][:, 1:] != IGNORE_INDEX).sum()
        self.trained.train()
        total, labels = self.layout.all_reduce_over_data(totals).tolist()
        result = {"loss": total / labels, "labels": int(labels), "tokens": self.step * self.recipe.tokens_per_step}
        self.logs.event("valid", self.step, **result, seconds=time.perf_counter() - started)
        self.clock += time.perf_counter() - started  # not part of the training speed
        return result

    def save(self, final: bool = False) -> None:
        if not self.recipe.checkpoint.enabled:
            return
        if self.pending:
            self.report()  # never save what is no number
        started = time.perf_counter()
        self.checkpoints.save(
            self.step, self.trained, self.optimizer, self.recipe, self.about, wait=final or self.recipe.checkpoint.blocking
        )
        self.logs.event("checkpoint", self.step, seconds=time.perf_counter() - started)
        self.clock += time.perf_counter() - started

    def finish(self, evaluated: dict[str, float], stopped: bool) -> dict[str, Any]:
        recipe = self.recipe
        self.checkpoints.wait()
        result: dict[str, Any] = {"directory": str(recipe.directory), "step": self.step, "valid": evaluated, "stopped": stopped}
        result["main"] = self.layout.world.is_main
        if self.step == recipe.run.steps and not stopped and recipe.checkpoint.enabled and recipe.checkpoint.export:
            if self.layout.world.is_main:
                export(recipe.directory, recipe.directory / "export", overwrite=True)
            self.layout.world.barrier()
            result["export"] = str(recipe.directory / "export")
        return result

    def close(self) -> None:
        self.prefetch.shutdown(cancel_futures=True)
        self.checkpoints.close()
        self.logs.close()


def open_rows(recipe: Recipe, part: Literal["train", "valid"], *, shuffle: bool, verify: Any = "sizes") -> CorpusRows:
    """The rows of ``data.train`` or ``data.valid``."""
    corpus = open_corpus(recipe, part, verify)
    seed = recipe.run.seed if recipe.data.seed is None else recipe.data.seed
    return CorpusRows(corpus, recipe.data.sequence, seed, shuffle, recipe.data.document_attention)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
