"""What a run leaves behind: a checkpoint like the one that came in, or an adapter beside it; with ``adapt.json`` and the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..distributed.world import World
from ..models.checkpoint_reader import Checkpoint, read_json
from ..models.checkpoint_writer import DirectoryWriter, new_directory
from ..models.convert import files_along, rewired_config
from ..models.families import family_of
from ..models.finite import NonFiniteError, cast_finite
from ..models.hf_config import wiring_of
from ..models.preflight import check_source
from ..models.quantization.linear import holds_quantised
from .checkpoints import what_is_kept
from .objective import restore_forward
from .outcome import FILE
from .settings import AdaptSettings
from .sharded_state import whole_weights
from .trainer import AdaptTrainer


def save_result(
    trainer: AdaptTrainer, settings: AdaptSettings, output: Path, world: World, document: dict[str, Any] | None = None
) -> None:
    """Plain weights in the student's own precision, tokenizer and config: a checkpoint like the one that came in. Or the adapter."""
    student = trainer.inner
    if settings.method == "lora" and (not settings.merge or holds_quantised(student)):
        save_adapter(trainer, settings, output, world, document)
        return
    if settings.method == "lora":
        adapters: Any = trainer.model
        adapters.merge_and_unload()
    restore_forward(student)
    weights = whole_weights(student) if trainer.sharded else dict(student.state_dict())
    if world.is_main:
        checkpoint = check_source(settings.trained).checkpoint
        stored = {"BF16": torch.bfloat16, "F16": torch.float16}.get(checkpoint.dtype(), torch.float32)
        checkpoint.close()
        with new_directory(output) as directory:
            weights = finite(weights, stored, output, trainer)
            student.config.dtype = stored
            student.save_pretrained(directory.path, state_dict=weights)
            config = read_json(directory.path / "config.json")
            config["use_cache"] = checkpoint.config.get("use_cache", True)  # the Trainer switched it off
            written = rewired_config(config, family_of(config), wiring_of(student.config))
            directory.rewrite("config.json", json.dumps(written, indent=2) + "\n")
            write_along(directory, checkpoint, document)
    world.barrier()


def save_adapter(
    trainer: AdaptTrainer, settings: AdaptSettings, output: Path, world: World, document: dict[str, Any] | None = None
) -> None:
    """In peft's format, with the tokenizer. Its base stays as it is."""
    model: Any = trainer.model
    whole = whole_weights(model) if trainer.sharded else model.state_dict()
    if world.is_main:
        source = Path(settings.trained)
        with new_directory(output) as directory:
            weights = finite(
                {name: tensor for name, tensor in whole.items() if "lora_" in name}, torch.float32, output, trainer
            )
            model.peft_config["default"].base_model_name_or_path = str(source.resolve() if source.is_dir() else source)
            model.save_pretrained(directory.path, state_dict=weights, save_embedding_layers=False)
            (directory.path / "README.md").unlink(missing_ok=True)  # peft's model card, with nothing filled in
            write_along(directory, check_source(settings.trained).checkpoint, document)
    world.barrier()


def finite(weights: dict[str, Any], dtype: torch.dtype, output: Path, trainer: AdaptTrainer) -> dict[str, Any]:
    try:
        return {name: cast_finite(name, tensor, dtype) for name, tensor in weights.items()}
    except NonFiniteError as error:
        raise NonFiniteError(f"{output} was not written: {error}; {what_is_kept(Path(str(trainer.args.output_dir)))}") from None


def write_along(directory: DirectoryWriter, checkpoint: Checkpoint, document: dict[str, Any] | None) -> None:
    """``adapt.json``, tokenizer and notices."""
    if document is not None:
        directory.rewrite(FILE, json.dumps(document, indent=1) + "\n")
    for name in files_along(checkpoint.directory):
        if not (directory.path / name).exists():
            directory.copy(checkpoint.directory / name, name)
