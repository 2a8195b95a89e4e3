"""The parts of a recovery run: models, loss, sharding, Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..core.config import Wiring
from ..distributed.world import World
from ..models.adapter import with_config
from ..models.checkpoint_reader import read_json
from ..models.hf_config import wiring_of
from ..models.loading import load_model
from ..models.quantization.linear import memory_held
from ..train.parallelize import parallelize
from .anneal import Anneal
from .attention import attention_for
from .distillation import LossWeights
from .objective import Objective, install_teacher_forward, install_training_forward
from .settings import AdaptSettings
from .trainer import AdaptTrainer, Stages


def precision_of(settings: AdaptSettings, world: World) -> torch.dtype | None:
    """What forward and backward compute in; None is float32 throughout."""
    name = settings.precision
    if name == "auto":
        name = "bf16" if world.device.type == "cuda" else "fp32"
    return torch.bfloat16 if name == "bf16" else None


class Models(NamedTuple):
    student: PreTrainedModel
    teacher: PreTrainedModel | None


def load_models(settings: AdaptSettings, world: World) -> Models:
    compute = precision_of(settings, world)
    # The optimizer needs float32; under LoRA it never touches these weights.
    low = compute is not None and settings.method == "lora"
    student = _load(settings.trained, settings, world, "bf16" if low else "fp32")
    if not distils(settings):
        return Models(student, None)
    teacher = _load(settings.teacher, settings, world, "fp32" if compute is None else "bf16").requires_grad_(False)
    install_teacher_forward(teacher)
    return Models(student, teacher)


def _load(source: str | None, settings: AdaptSettings, world: World, dtype: str) -> PreTrainedModel:
    """Safetensors alone, as everywhere. Ranks hold whole models (or FSDP's shards of them), not slices of tensor parallelism."""
    assert source is not None
    attention = attention_for(read_json(with_config(source, weights=False) / "config.json"), settings.sequence)
    return load_model(source, World(device=world.device), dtype=dtype, attention=attention, keep_quantised=True)


def distils(settings: AdaptSettings) -> bool:
    """LoRA learns from the teacher if there is one, else from the text; so does its control from the text."""
    return settings.method == "distill" or (settings.method == "lora" and settings.teacher is not None and not settings.control)


def build_trainer(
    settings: AdaptSettings, world: World, models: Models, rows: Any, folder: Path, log: Callable[[str], None]
) -> AdaptTrainer:
    """Loss, sharding and Trainer of a run."""
    student, teacher = models
    compute = precision_of(settings, world)
    wiring = wiring_of(student.config)
    for spec in settings.stages:
        Wiring.parse(spec, wiring.num_layers)
    if settings.anneal and wiring.kind != "ladder":
        raise ValueError(f"anneal leads from standard to ladder, and wiring {wiring.spec} is neither: drop anneal")
    sharded = settings.parallel == "fsdp"
    if sharded and world.size == 1:
        raise ValueError(
            "parallel fsdp needs several ranks: start with torchrun --nproc-per-node N -m ladder_residual adapt ..."
        )
    weights = None
    if distils(settings):
        weights = LossWeights(data=settings.data_weight, temperature=settings.temperature, top_k=settings.top_k)
    matched = tuple(range(wiring.layers[0], wiring.num_layers)) if wiring.layers and settings.hidden_weight else ()
    torch.manual_seed(settings.seed)  # adapters begin at random: alike in every run, and on every rank
    model: Any = with_lora(student, settings) if settings.method == "lora" else student
    objective = Objective(weights, matched, None if sharded else compute, settings.compile)
    install_training_forward(student, objective)
    options: dict[str, Any] = {
        "compile_options": {} if settings.compile else None,
        "data_mesh": init_device_mesh(world.device.type, (world.size,)) if sharded else None,
        "compute_dtype": compute,
    }
    parallelize(student, checkpoint_activations=settings.gradient_checkpointing, **options)
    if teacher is not None:
        parallelize(teacher, **options)
    for role, held in (("student", student), ("teacher", teacher)):
        if held is not None and (said := memory_held(held)):
            log(f"{role}  {said}")
    log(f"student  wiring {wiring.spec}, method {settings.method}{', control' if settings.control else ''}")
    trainer = AdaptTrainer(
        settings,
        model.train(),
        student,
        objective,
        rows,
        training_arguments(settings, world, len(rows), folder),
        world,
        teacher=teacher,
        stages=Stages(settings.stages, wiring.spec, settings.stages_share, log) if settings.stages else None,
        anneal=Anneal(student, settings.anneal, settings.anneal_kl, log) if settings.anneal else None,
        sharded=sharded,
    )
    for printer in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
        trainer.remove_callback(printer)
    if settings.progress and world.is_main:
        trainer.add_callback(ProgressBar())
    return trainer


class ProgressBar(ProgressCallback):
    """The Trainer's own, with the loss at its end: standard output belongs to the caller."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        bar: Any = self.training_bar
        if bar is not None and logs and "loss" in logs:
            bar.set_postfix(loss=f"{logs['loss']:.4f}")


def with_lora(student: PreTrainedModel, settings: AdaptSettings) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        raise ValueError("method lora needs the peft package: pip install 'ladder-residual[train]'") from None
    options: dict[str, Any] = dict(r=settings.lora_rank, lora_alpha=settings.lora_alpha, task_type="CAUSAL_LM")
    model = get_peft_model(student, LoraConfig(target_modules=list(settings.lora_targets) or "all-linear", **options))
    if any(isinstance(end, BaseTunerLayer) for end in (student.get_input_embeddings(), student.get_output_embeddings())):
        raise ValueError(
            f"lora_targets {', '.join(settings.lora_targets)} name the head or the embedding: name projections of the layers"
        )
    return model


def training_arguments(settings: AdaptSettings, world: World, rows: int, folder: Path) -> TrainingArguments:
    per_rank = settings.rows_per_step // world.size
    if per_rank * world.size != settings.rows_per_step:
        raise ValueError(
            f"a step of {settings.rows_per_step} rows does not divide over {world.size} ranks; change batch_tokens"
        )
    micro = settings.micro_rows or per_rank
    if per_rank % micro:
        raise ValueError(f"micro_rows={micro} does not divide the {per_rank} rows each rank has in a step")
    steps = rows // settings.rows_per_step
    warmup = math.ceil(settings.warmup * steps) if settings.warmup < 1 else int(settings.warmup)
    schedule, options = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": settings.final_rate}),
        "linear": ("linear", {}),
        "constant": ("constant_with_warmup", {}),
    }[settings.schedule]
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=per_rank // micro,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=options,
        warmup_steps=warmup,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        max_grad_norm=settings.clip,
        optim="adamw_torch_fused" if world.device.type == "cuda" else "adamw_torch",
        seed=settings.seed,
        save_strategy="steps" if settings.save_every else "no",
        save_steps=settings.save_every or 500,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,  # a loss that is no number stops the run (trainer.py)
        remove_unused_columns=False,
        report_to=[],  # TensorBoard gets its own folder (adapt)
        use_cpu=world.device.type == "cpu",
        ddp_backend="gloo" if world.device.type == "cpu" and world.size > 1 else None,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=world.device.type == "cuda",
        disable_tqdm=not (settings.progress and world.is_main),
    )


@contextmanager
def tensorboard(folder: Path, world: World) -> Iterator[TrainerCallback | None]:
    """Curves to watch with ``tensorboard --logdir``, where that package is installed. However the block ends, its thread does too."""
    import importlib.util

    if not world.is_main or importlib.util.find_spec("tensorboard") is None:
        yield None
        return
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    with SummaryWriter(folder / "tensorboard") as writer:
        yield TensorBoardCallback(writer)
