"""transformers' Trainer with our loss, wirings that change during the run, sharding, and checkpoints that are whole or absent.

Everything else is the Trainer's: the loop, accumulation, DDP, clipping, schedules, logging, TensorBoard, the progress bar, resume.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from ..data.corpus_rows import IGNORE_INDEX
from ..data.packing import RowStore, collate
from ..distributed.world import World
from ..models.hf import rewire
from ..train.loss import chunked_cross_entropy, head_of
from ..train.stop_signal import StopSignal
from .anneal import Anneal
from .checkpoints import (
    LATEST,
    check_moments,
    checkpoints,
    complete,
    last_checkpoint,
    load_adapter,
    load_weights,
    read_optimizer,
    reading,
    saving,
    step_of,
)
from .graphs import GraphedStep
from .objective import Counts, Objective
from .settings import AdaptSettings
from .sharded_state import load_sharded, save_sharded, whole_weights

OPTIMIZER = "optimizer.pt"
_NEVER = torch.iinfo(torch.int64).max  # the step in which the loss became no number


class Diverged(ValueError):
    """The loss is no longer a number."""


class AdaptTrainer(Trainer):
    """``student`` has its training ``forward`` attached (``objective.py``) and, if ``sharded``, went through ``fully_shard``."""

    def __init__(
        self,
        settings: AdaptSettings,
        student: nn.Module,
        inner: PreTrainedModel,
        objective: Objective,
        rows: Any,
        args: TrainingArguments,
        world: World,
        *,
        teacher: PreTrainedModel | None = None,
        stages: Stages | None = None,
        anneal: Anneal | None = None,
        sharded: bool = False,
    ) -> None:
        self.settings, self.inner, self.teacher, self.sharded = settings, inner, teacher, sharded
        self.objective: Objective = objective
        self.world = world
        self.stages, self.anneal = stages, anneal
        self.padded = rows.padded
        super().__init__(student, args, data_collator=partial(collate, padded=rows.padded), train_dataset=rows)
        if anneal is not None:
            self.add_callback(anneal)
        self.model_accepts_loss_kwargs = True  # our losses are divided by counts over all accumulation steps and ranks
        if sharded:
            # Sharded already: no DDP around it, nothing to place.
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.graphed: GraphedStep | None = None
        if settings.graphs:
            if args.device.type != "cuda" or args.world_size > 1 or args.gradient_accumulation_steps > 1:
                raise ValueError("CUDA graphs need one GPU process and a step without accumulation: drop graphs")
            self.graphed = GraphedStep(student, partial(self.parts, student))
        self._parts: dict[str, Tensor] = {}
        self._first_bad = torch.full((), _NEVER, dtype=torch.int64, device=args.device)
        self._parts_steps = 0

    # ---- data and loss

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]  # shuffled already

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        return count(batch_samples, device)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        parts = self.parts(model, inputs, num_items_in_batch, self.hidden_weight())
        parts["loss"] = parts["loss"] * self.accelerator.num_processes  # ranks' gradients are averaged, our divisors count all
        self._note(parts)
        return (parts["loss"], parts) if return_outputs else parts["loss"]

    def _note(self, parts: dict[str, Tensor]) -> None:
        """For the log; and whether the loss is still a number, without waiting for the GPU."""
        if_bad = self._first_bad.clamp_max(self.state.global_step + 1)
        self._first_bad = torch.where(torch.isfinite(parts["loss"].detach()), self._first_bad, if_bad)
        if self.anneal is not None and "divergence" in parts:
            self.anneal.note(parts["divergence"])
        for name, value in parts.items():
            if name != "loss":
                self._parts[name] = self._parts.get(name, 0.0) + value.detach()

    def parts(self, model: nn.Module, inputs: Any, counts: Counts, hidden_weight: Tensor | float = 0.0) -> dict[str, Tensor]:
        extra: dict[str, Any] = {}
        if self.objective.distill is not None:
            assert self.teacher is not None
            layers = self.objective.layers if isinstance(hidden_weight, Tensor) or hidden_weight else ()
            with torch.no_grad():
                states = self.teacher(input_ids=inputs["input_ids"], layers=layers)
            extra = {"teacher": states, "teacher_head": head_of(self.teacher), "hidden_weight": hidden_weight}
        return model(**inputs, counts=counts, **extra)

    def hidden_weight(self) -> float:
        """Falls linearly to 0 over the first ``hidden_share`` of the run."""
        progress = self.state.global_step / max(1, self.state.max_steps)
        return self.settings.hidden_weight * max(0.0, 1.0 - progress / self.settings.hidden_share)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self.stages is not None:
            self.stages.enter(self.inner, self.state.global_step / max(1, self.state.max_steps))
        if self.graphed is None:
            return super().training_step(model, inputs, num_items_in_batch)
        inputs = self._prepare_inputs(inputs)
        wiring = (self.stages and self.stages.current, self.anneal is not None and self.anneal.switched < 1)
        try:
            parts = self.graphed.run(wiring, inputs, num_items_in_batch, self.hidden_weight())
        except RuntimeError as error:
            warnings.warn(f"no CUDA graph of this step ({str(error)[:200]}): going on without", stacklevel=2)
            self.graphed = None
            return super().training_step(model, inputs, num_items_in_batch)
        self._note(parts)
        return parts["loss"]

    def _batches(self, store: RowStore, rows: int) -> Iterator[tuple[dict[str, Tensor], Counts]]:
        """The first ``rows`` rows of a held-out text."""
        micro, rows = self.args.per_device_train_batch_size, min(rows, len(store))
        rows = rows // micro * micro or rows  # equal shapes: nothing is compiled for the sake of the last batch
        for start in range(0, rows, micro):
            shown = [store.row(index) for index in range(start, min(start + micro, rows))]
            batch = collate(shown, padded=self.padded or store.padded)
            batch = {name: value.to(self.args.device) for name, value in batch.items()}
            yield batch, count([batch], self.args.device, across_ranks=False)

    def measure(self, store: RowStore, rows: int) -> dict[str, float]:
        """Mean loss (and divergence from the teacher) on the first ``rows`` rows of a held-out text."""
        learned = tokens = cross_entropy = divergence = 0.0
        with self._measuring(), self.anneal.as_ladder() if self.anneal is not None else nullcontext():
            for batch, counts in self._batches(store, rows):
                parts = self.parts(self.model_wrapped, batch, counts)
                learned += float(counts.learned)
                tokens += float(counts.tokens)
                cross_entropy += float(parts["cross_entropy"]) * float(counts.learned)
                divergence += float(parts.get("divergence", 0.0)) * float(counts.tokens)
                del parts
        result = {"loss": cross_entropy / learned, "tokens": tokens}
        if self.objective.distill is not None:
            result["kl"] = divergence / tokens
        return result

    def measure_teacher(self, store: RowStore, rows: int) -> float | None:
        """The teacher's own mean loss on these rows, None without a teacher."""
        if self.teacher is None:
            return None
        total = learned = 0.0
        with torch.no_grad():
            for batch, counts in self._batches(store, rows):
                hidden = self.teacher(input_ids=batch["input_ids"]).hidden
                loss = chunked_cross_entropy(hidden, head_of(self.teacher), batch["labels"], divisor=counts.learned)
                total += float(loss.cross_entropy) * float(counts.learned)
                learned += float(counts.learned)
        return total / learned

    def train(self, *args: Any, **kwargs: Any) -> Any:
        outcome = super().train(*args, **kwargs)
        if self.stages is not None:
            self.stages.enter(self.inner, 1.0)  # a run too short for all its stages still ends as what was asked for
        return outcome

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        if self.objective.compiled and not _drops_out(self.inner):
            yield  # without dropout both modes compute the same; in another mode everything would be compiled once more
            return
        training = self.model_wrapped.training
        self.model_wrapped.eval()
        with torch.no_grad():
            yield
        self.model_wrapped.train(training)

    # ---- optimizer

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None and self.settings.optimizer == "muon":
            from .muon import muon_with_adamw

            self.optimizer = muon_with_adamw(self.inner, self.settings)
            return self.optimizer
        return super().create_optimizer(model)

    # ---- what is logged, and when to stop

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self.check_finite()
            steps = max(1, self.state.global_step - self._parts_steps)
            for name, value in self._parts.items():
                logs[name] = float(self._over_ranks(value, dist.ReduceOp.SUM)) / steps
            self._parts, self._parts_steps = {}, self.state.global_step
            if self.anneal is not None:
                logs["switched"] = self.anneal.used
            logs["tokens"] = self.state.global_step * self.settings.batch_tokens
        super().log(logs, start_time)

    def check_finite(self) -> None:
        step = int(self._over_ranks(self._first_bad, dist.ReduceOp.MIN))
        if step == _NEVER:
            return
        folder = Path(str(self.args.output_dir))
        if self.args.should_save:
            for checkpoint in checkpoints(folder):
                if step_of(checkpoint) >= step - 1:  # its weights are those that gave the bad loss
                    shutil.rmtree(checkpoint)
        good = last_checkpoint(folder, before=step - 1)
        kept = f"the last good checkpoint is {good}" if good else "no checkpoint was saved before it (--save-every)"
        raise Diverged(
            f"the loss is no number any more since step {step}: training stopped, {kept}. A lower learning rate "
            f"(now {self.settings.learning_rate:g}) or a longer warm-up is the usual cure"
        )

    def _over_ranks(self, value: Tensor, operation: Any) -> Tensor:
        result = value.clone()
        if self.world.size > 1:
            dist.all_reduce(result, operation)
        return result

    # ---- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Written aside and renamed when complete: whatever stops us, every ``checkpoint-N`` is whole."""
        self.check_finite()
        folder, name = Path(str(self.args.output_dir)), f"{LATEST}{self.state.global_step}"
        scratch = folder / ".saving"
        with saving(scratch, self.state.global_step, folder, self.args.should_save):
            self.world.barrier()
            self._saving_to = str(scratch)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._saving_to = None
            if self.anneal is not None and self.args.should_save:
                self.anneal.save(scratch / name)
            self.world.barrier()
            complete(scratch / name, self.state.global_step, self.world)
            if self.args.should_save:
                shutil.rmtree(folder / name, ignore_errors=True)
                (scratch / name).rename(folder / name)
                scratch.rmdir()
                for old in checkpoints(folder)[: -self.settings.keep]:
                    shutil.rmtree(old)
        self.world.barrier()

    _saving_to: str | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return self._saving_to or super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.sharded:
            super().save_model(output_dir, _internal_call)
            return
        weights = whole_weights(self.inner)
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The schedule is a function of the step: nothing of it is saved."""
        if self.sharded:
            save_sharded(self.inner, self.optimizer, Path(output_dir))
        elif self.args.should_save:
            optimizer: Any = self.optimizer
            torch.save(optimizer.state_dict(), Path(output_dir) / OPTIMIZER)

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        places = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)  # of these settings, not of those the checkpoint was saved with
        return places

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The Trainer's own would open pickles, adapters in folders with settings of their own, and what an index names elsewhere."""
        if self.anneal is not None:
            with reading(resume_from_checkpoint):
                self.anneal.load(Path(resume_from_checkpoint))
        if self.sharded:
            return  # sharded weights come with the optimizer's state
        with reading(resume_from_checkpoint):
            if self.settings.method == "lora":
                load_adapter(self.model, Path(resume_from_checkpoint))
            else:
                load_weights(self.inner, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Hyper-parameters are the optimizer's own: the settings and the schedule make them."""
        if checkpoint is None:
            return
        optimizer, schedule, step = cast(Any, self.optimizer), cast(Any, self.lr_scheduler), self.state.global_step
        settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        with reading(checkpoint):
            if self.sharded:
                load_sharded(self.inner, optimizer, Path(checkpoint))
            else:
                optimizer.load_state_dict(read_optimizer(Path(checkpoint) / OPTIMIZER))
            check_moments(getattr(optimizer, "optimizer", optimizer))  # accelerate wraps it
        rates = [base * share(step) for base, share in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        schedule.load_state_dict(schedule.state_dict() | {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates})
        for group, own, rate in zip(optimizer.param_groups, settings, rates, strict=True):
            group.update(own | {"lr": rate})

    def _load_scaler(self, checkpoint: str | None) -> None:
        """bf16 and fp32 have none."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(checkpoint or ""):
            super()._load_rng_state(checkpoint)


class StopOnSignal(TrainerCallback):
    """Ends the run with a checkpoint after the step in which the ranks agree on having received SIGTERM."""

    def __init__(self, stop: StopSignal) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stop.requested():
            control.should_save = control.should_training_stop = True


class Stages:
    """Progressive conversion: which wiring is in force at which point of the run."""

    def __init__(self, specs: tuple[str, ...], final: str, share: float, log: Callable[[str], None]) -> None:
        self.specs = (*specs, final) if not specs or specs[-1] != final else specs
        self.share, self.log = share, log
        self.current: str | None = None

    def at(self, progress: float) -> str:
        return self.specs[min(int(progress / self.share * (len(self.specs) - 1)), len(self.specs) - 1)]

    def enter(self, model: PreTrainedModel, progress: float) -> None:
        if (spec := self.at(progress)) != self.current:
            rewire(model, spec)
            self.log(f"stage    {spec} from {100 * progress:.0f} % of the run")
            self.current = spec


def count(batches: list[Any], device: torch.device, *, across_ranks: bool = True) -> Counts:
    """Without looking at the values: on CUDA nothing waits."""
    tokens = sum(batch["counted"].sum() if "counted" in batch else batch["labels"].numel() for batch in batches)
    learned = sum((batch["labels"][:, 1:] != IGNORE_INDEX).sum() for batch in batches)
    totals = torch.stack([torch.as_tensor(value, dtype=torch.float32, device=device) for value in (tokens, learned)])
    if across_ranks and dist.is_initialized():
        dist.all_reduce(totals)
    totals = totals.clamp_min(1)
    return Counts(totals[0], totals[1])


def _drops_out(model: PreTrainedModel) -> bool:
    inside = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    return inside or bool(getattr(model.config, "attention_dropout", 0.0))
