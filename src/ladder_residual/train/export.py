"""A run's newest checkpoint as a Hugging Face directory: safetensors, config with the wiring, tokenizer.

Read from the checkpoint on disk, a few gigabytes at a time, by one process: nothing is gathered over ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from ..data.tokenizer import read_tokenizer
from ..models.checkpoint_writer import DirectoryWriter, new_directory
from ..models.finite import NonFiniteError, cast_finite
from ..models.hf import ladder_classes
from ..models.hf_config import STUB, stub_text
from ..models.loading import DTYPES, built_from
from .checkpoints import complete_checkpoints, problem_of, read_training_manifest
from .dcp_checkpoint import load_tensors, stored_tensors
from .manifest import MANIFEST
from .model import hf_config
from .recipe import Recipe

SHARD_BYTES = 4 << 30
Stored = dict[str, TensorStorageMetadata]


def export(
    run: str | Path, target: str | Path, *, dtype: str | None = None, overwrite: bool = False, tokenizer: str | None = None
) -> Path:
    """Write ``run`` (its directory) to ``target``. ``dtype``: that of the weights, default bfloat16 for a bf16 run, else float32.

    ``tokenizer`` replaces the one the training data names. Returns the checkpoint that was exported.
    """
    run, target = Path(run), Path(target)
    newest = _newest_good(run)
    manifest = read_training_manifest(newest)
    recipe: Recipe = manifest["recipe"]
    wanted = dtype or ("bfloat16" if recipe.run.precision == "bf16" else "float32")
    if wanted not in DTYPES:
        raise ValueError(f"unknown dtype {wanted!r}; choose from {', '.join(DTYPES)}")
    if target.exists() and not overwrite:
        raise ValueError(f"{target} exists; choose another directory or use --overwrite")
    stored = {name.removeprefix("model."): entry for name, entry in stored_tensors(newest).items() if name.startswith("model.")}
    if recipe.model.shape().num_layers > len(stored):
        raise ValueError(
            f"{newest} holds {len(stored)} weights, too few for the {recipe.model.shape().num_layers} layers it names"
        )
    with built_from(newest / MANIFEST):
        config = hf_config(recipe, end_of_document=manifest.get("end_of_document"))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    _check_shapes(newest, stored, {name: parameter.shape for name, parameter in model.named_parameters()})
    with new_directory(target, overwrite=overwrite) as directory:
        _write_weights(newest, stored, directory, DTYPES[wanted])
        config.dtype = DTYPES[wanted]
        config.architectures = [ladder_classes(recipe.model.shape().family)[1].__name__]
        config.save_pretrained(directory.path)
        directory.write(STUB, stub_text())
        _write_tokenizer(tokenizer or manifest.get("tokenizer"), directory.path, must=tokenizer is not None)
    return newest


def _newest_good(run: Path) -> Path:
    problems = []
    for path in reversed(complete_checkpoints(run / "checkpoints")):
        if not (problem := problem_of(path)):
            return path
        problems.append(f"{path.name}: {problem}")
    detail = f" ({'; '.join(problems)})" if problems else ""
    raise ValueError(f"{run} holds no good checkpoint{detail}; is it the directory of a run of `ladder train`?")


def _check_shapes(checkpoint: Path, stored: Stored, expected: dict[str, torch.Size]) -> None:
    """Before memory is taken for what a forged checkpoint claims to hold."""
    if missing := sorted(expected.keys() ^ stored.keys()):
        raise ValueError(f"{checkpoint} does not hold the weights of its recipe: {missing[0]:.80} is on one side only")
    for name, entry in stored.items():
        if entry.size != expected[name] or not entry.properties.dtype.is_floating_point:
            found = f"{list(entry.size)} of {entry.properties.dtype}"
            raise ValueError(f"{checkpoint}: {name} is {found:.80}, its recipe needs {list(expected[name])} of floats")


def _write_weights(checkpoint: Path, stored: Stored, directory: DirectoryWriter, dtype: torch.dtype) -> None:
    shards = split_state_dict_into_shards_factory(
        stored,
        get_storage_size=lambda entry: entry.size.numel() * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    for file, names in shards.filename_to_tensors.items():
        state: dict[str, Any] = {
            f"model.{name}": torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names
        }
        load_tensors(state, checkpoint, None)
        try:
            weights = {name: cast_finite(name, state[f"model.{name}"], dtype) for name in names}
        except NonFiniteError as error:
            raise NonFiniteError(f"{checkpoint}: {error}; --dtype bfloat16 and float32 have the widest range") from None
        directory.write_tensors(file, weights)
    if shards.is_sharded:
        directory.write_index(shards.tensor_to_filename, shards.metadata["total_size"])


def _write_tokenizer(source: str | None, target: Path, *, must: bool) -> None:
    if source is None:
        return
    try:
        read_tokenizer(source).save_pretrained(target)
    except ValueError:
        if must:
            raise
