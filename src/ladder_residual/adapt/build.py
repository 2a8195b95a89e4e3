"""The parts of a healing run: models, loss, sharding, Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from ..checkpoint import read_json, resolve
from ..config import Wiring
from ..hf_config import wiring_of
from ..loading import load_model
from ..parallel import World
from .attention import attention_for
from .losses import Mixture
from .objective import Objective, attach, attach_teacher
from .settings import Settings
from .trainer import AdaptTrainer, Stages


def precision_of(settings: Settings, world: World) -> torch.dtype | None:
    """What forward and backward compute in; None is float32 throughout."""
    name = settings.precision
    if name == "auto":
        name = "bf16" if world.device.type == "cuda" else "fp32"
    return torch.bfloat16 if name == "bf16" else None


class Models(NamedTuple):
    student: PreTrainedModel
    teacher: PreTrainedModel | None


def load_models(settings: Settings, world: World) -> Models:
    compute = precision_of(settings, world)
    source = settings.teacher if settings.control else settings.student
    assert source is not None
    alone = World(device=world.device)  # ranks hold whole models (or FSDP's shards of them), not slices of tensor parallelism
    # The optimizer needs float32; under LoRA it never touches these weights.
    dtype = "bf16" if settings.method == "lora" and compute is not None else "fp32"
    config = read_json(resolve(source, weights=False) / "config.json")
    student = load_model(source, alone, dtype=dtype, attention=attention_for(config, settings.sequence))
    teacher = load_teacher(settings, world, compute) if distils(settings) else None
    if settings.gradient_checkpointing:
        student.gradient_checkpointing_enable()
    if settings.compile:
        from ..train.compiling import compile_blocks

        compile_blocks(student)
        if teacher is not None:
            compile_blocks(teacher)
    return Models(student, teacher)


def distils(settings: Settings) -> bool:
    """LoRA learns from the teacher if there is one, else from the text; so does its control from the text."""
    return settings.method == "distill" or (settings.method == "lora" and settings.teacher is not None and not settings.control)


def build_trainer(
    settings: Settings, world: World, models: Models, rows: Any, folder: Path, tell: Callable[[str], None]
) -> AdaptTrainer:
    """Loss, sharding and Trainer of a run."""
    student, teacher = models
    compute = precision_of(settings, world)
    wiring = wiring_of(student.config)
    for spec in settings.stages:
        Wiring.parse(spec, wiring.num_layers)
    sharded = settings.parallel == "fsdp"
    if sharded and world.size == 1:
        raise ValueError(
            "parallel fsdp needs several ranks: start with torchrun --nproc-per-node N -m ladder_residual adapt ..."
        )
    mixture = None
    if distils(settings):
        mixture = Mixture(data=settings.data_weight, temperature=settings.temperature, top_k=settings.top_k)
    matched = tuple(range(wiring.layers[0], wiring.num_layers)) if wiring.layers and settings.hidden_weight else ()
    torch.manual_seed(settings.seed)  # adapters begin at random: alike in every run, and on every rank
    model: Any = with_lora(student, settings) if settings.method == "lora" else student
    objective = Objective(mixture, matched, None if sharded else compute, settings.compile)
    attach(student, objective)
    if sharded:
        from .sharded import shard

        shard(student, world, compute)
        if teacher is not None:
            shard(teacher, world, compute)
    tell(f"student  wiring {wiring.spec}, method {settings.method}{', control' if settings.control else ''}")
    return AdaptTrainer(
        settings,
        model.train(),
        student,
        objective,
        rows,
        training_arguments(settings, world, len(rows), folder),
        teacher=teacher,
        stages=Stages(settings.stages, wiring.spec, settings.stages_share, tell) if settings.stages else None,
        sharded=sharded,
    )


def load_teacher(settings: Settings, world: World, compute: torch.dtype | None) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    assert settings.teacher is not None
    directory = resolve(settings.teacher)
    attention = attention_for(read_json(directory / "config.json"), settings.sequence)
    options = {"attn_implementation": attention} if attention else {}
    teacher: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=compute or torch.float32, **options)
    attach_teacher(teacher)
    return teacher.to(world.device).eval().requires_grad_(False)


def with_lora(student: PreTrainedModel, settings: Settings) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("method lora needs the peft package: pip install 'ladder-residual[train]'") from None
    options: dict[str, Any] = dict(r=settings.lora_rank, lora_alpha=settings.lora_alpha, task_type="CAUSAL_LM")
    return get_peft_model(student, LoraConfig(target_modules=list(settings.lora_targets) or "all-linear", **options))


def training_arguments(settings: Settings, world: World, rows: int, folder: Path) -> TrainingArguments:
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


def tensorboard(folder: Path, world: World) -> list[TrainerCallback]:
    """Curves to watch with ``tensorboard --logdir``, where that package is installed."""
    import importlib.util

    if not world.is_main or importlib.util.find_spec("tensorboard") is None:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(folder / "tensorboard"))]
