"""A run's newest checkpoint as a Hugging Face directory: safetensors, config with the wiring, tokenizer.

Read from the checkpoint on disk, a few gigabytes at a time, by one process: nothing is gathered over ranks.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..corpus.tokens import read_tokenizer
from ..loading import DTYPES
from ..model import ladder_classes, write_stub
from .building import hf_config
from .checkpoints import MANIFEST, check_files, complete_checkpoints, expect_one_process
from .reading import CheckpointReader
from .recipe import Recipe

SHARD_BYTES = 4 << 30


def export(
    run: str | Path, target: str | Path, *, dtype: str | None = None, overwrite: bool = False, tokenizer: str | None = None
) -> Path:
    """Write ``run`` (its directory) to ``target``. ``dtype``: that of the weights, default bfloat16 for a bf16 run, else float32.

    ``tokenizer`` replaces the one the training data names. Returns the checkpoint that was exported.
    """
    run, target = Path(run), Path(target)
    newest = _newest_good(run)
    manifest = json.loads((newest / MANIFEST).read_text(encoding="utf-8"))
    recipe = Recipe.from_dict(manifest["recipe"], str(newest))
    wanted = dtype or ("bfloat16" if recipe.run.precision == "bf16" else "float32")
    if wanted not in DTYPES:
        raise ValueError(f"unknown dtype {wanted!r}; choose from {', '.join(DTYPES)}")
    if target.exists() and not overwrite:
        raise ValueError(f"{target} exists; choose another directory or use --overwrite")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        scratch.chmod(0o755)
        _write_weights(newest, scratch, DTYPES[wanted])
        config = hf_config(recipe, end_of_document=manifest.get("end_of_document"))
        config.dtype = DTYPES[wanted]
        config.architectures = [ladder_classes(recipe.model.shape().family)[1].__name__]
        config.save_pretrained(scratch)
        write_stub(scratch)
        _write_tokenizer(tokenizer or manifest.get("tokenizer"), scratch, must=tokenizer is not None)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return newest


def _newest_good(run: Path) -> Path:
    problems = []
    for path in reversed(complete_checkpoints(run / "checkpoints")):
        if not (problem := check_files(path)):
            return path
        problems.append(f"{path.name}: {problem}")
    detail = f" ({'; '.join(problems)})" if problems else ""
    raise ValueError(f"{run} holds no good checkpoint{detail}; is it the directory of a run of `ladder train`?")


def _write_weights(checkpoint: Path, target: Path, dtype: torch.dtype) -> None:
    expect_one_process()
    reader = CheckpointReader(checkpoint)
    stored = {
        name.removeprefix("model."): entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    groups = list(_in_shards({name: entry.size.numel() * dtype.itemsize for name, entry in stored.items()}))
    where: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        state: dict[str, Any] = {
            f"model.{name}": torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names
        }
        dcp.load(state, storage_reader=CheckpointReader(checkpoint), no_dist=True)
        file = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({name: state[f"model.{name}"].to(dtype) for name in names}, target / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    if len(groups) > 1:
        total = sum(entry.size.numel() * dtype.itemsize for entry in stored.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _in_shards(sizes: dict[str, int]) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if names and filled + size > SHARD_BYTES:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names


def _write_tokenizer(source: str | None, target: Path, *, must: bool) -> None:
    if source is None:
        return
    try:
        read_tokenizer(source).save_pretrained(target)
    except ValueError:
        if must:
            raise
