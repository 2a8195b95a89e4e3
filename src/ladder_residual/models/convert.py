"""Rewire a checkpoint on disk: its ``config.json`` changes, its weights do not.

Weights are linked (or copied) as they are, so converting takes seconds at any size. A new target appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import Checkpoint, resolve
from .config import AUTHORS_KEY, CONFIG_KEY, Wiring
from .families import Family, check_wiring, family_of

_BASE_ARCHITECTURES = "base_architectures"  # what the checkpoint was called before, so that the way back is exact
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")
_SKIP = ("config.json", "ladder_stub.py")


@dataclass(frozen=True)
class Conversion:
    """What was done."""

    target: Path
    family: str
    before: Wiring
    after: Wiring
    weights: list[str]
    placed: str  # "linked" or "copied"
    kept: list[str]  # tokenizer and other files taken along


def convert(source: str | Path, target: str | Path, wiring: str, *, copy: bool = False, overwrite: bool = False) -> Conversion:
    """Write ``source`` (directory or hub id) to ``target`` with another wiring; ``standard`` is the way back."""
    directory, target = resolve(source).resolve(), Path(target).resolve()
    checkpoint = Checkpoint(directory)
    family = family_of(checkpoint.config)
    layers = checkpoint.config.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise ValueError(f"{directory / 'config.json'}: num_hidden_layers is {layers!r:.40}, expected a whole number")
    before = Wiring.from_config(checkpoint.config, layers)
    after = Wiring.parse(wiring, layers)
    check_wiring(family, after)
    before.check_same_weights(after)
    checkpoint.close()
    _check_target(directory, target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Made beside the target and renamed at the end: whoever looks sees the old state or the finished one.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        scratch.chmod(0o755)
        place = _copy if copy else _link
        weights = sorted(set(checkpoint.files.values()))
        methods = {place(directory / name, scratch / name) for name in weights}
        kept = []
        for path in sorted(directory.iterdir()):
            if path.is_file() and path.name not in _SKIP and path.suffix not in _WEIGHTS:
                shutil.copyfile(path, scratch / path.name)
                kept.append(path.name)
        config = rewired_config(checkpoint.config, family, after)
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if after.kind != "standard":
            from importlib import resources

            stub = resources.files("ladder_residual").joinpath("data", "ladder_stub.py").read_text(encoding="utf-8")
            (scratch / "ladder_stub.py").write_text(stub, encoding="utf-8")
        _put_in_place(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    placed = "copied" if "copied" in methods else "linked"
    return Conversion(target, family.model_type, before, after, weights, placed, kept)


def rewired_config(config: dict[str, object], family: Family, wiring: Wiring) -> dict[str, object]:
    """``config.json`` with another wiring. A rewired one has its own model_type, so nothing loads it as the plain model."""
    plain = {
        key: value for key, value in config.items() if key not in (CONFIG_KEY, AUTHORS_KEY, "auto_map", _BASE_ARCHITECTURES)
    }
    base = config.get(_BASE_ARCHITECTURES) or config.get("architectures")
    if config["model_type"] == family.ladder_type and _BASE_ARCHITECTURES not in config:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        base = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]]
    if wiring.kind == "standard":
        return plain | {"model_type": family.model_type, "architectures": base}
    from .hf_config import auto_map, class_name

    return plain | {
        "model_type": family.ladder_type,
        "architectures": [class_name(family.model_type, "ForCausalLM")],
        "auto_map": auto_map(family.model_type),
        CONFIG_KEY: wiring.spec,
        _BASE_ARCHITECTURES: base,
    }


def _put_in_place(scratch: Path, target: Path) -> None:
    """A new target appears whole. In one that is overwritten the old files go aside, come back if anything goes wrong, and are
    deleted last; the directory itself stays (it may be somebody's working directory)."""
    if not target.exists():
        scratch.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    try:
        _move_all(target, aside)
        _move_all(scratch, target)
    except BaseException:
        _move_all(target, scratch)
        _move_all(aside, target)
        aside.rmdir()
        raise
    scratch.rmdir()
    shutil.rmtree(aside)


def _move_all(source: Path, target: Path) -> None:
    for path in list(source.iterdir()):
        path.rename(target / path.name)


def check_target(source: str | Path, target: str | Path, overwrite: bool = False) -> None:
    """ValueError where ``convert`` would refuse to write; for callers that have minutes of work before it."""
    _check_target(resolve(source).resolve(), Path(target).resolve(), overwrite)


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    if target == source:
        raise ValueError(f"source and target are the same directory ({target}); choose another target")
    if overwrite and target in source.parents:
        raise ValueError(
            f"{target} contains the source {source}: overwriting it would delete the source; choose another target"
        )
    if target.exists():
        if not target.is_dir():
            raise ValueError(f"{target} exists and is not a directory")
        if any(target.iterdir()) and not overwrite:
            raise ValueError(f"{target} is not empty; choose another target or pass --overwrite")
        if overwrite and not (target / "config.json").exists() and any(target.iterdir()):
            raise ValueError(f"{target} holds files but no config.json, so it is no checkpoint: not overwritten")
        folders = sorted(path.name for path in target.iterdir() if path.is_dir())
        if folders:
            raise ValueError(f"{target} holds the directory {folders[0]}, which is no part of a checkpoint: not overwritten")


def _link(source: Path, target: Path) -> str:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        return _copy(source, target)
    return "linked"


def _copy(source: Path, target: Path) -> str:
    shutil.copyfile(source, target)
    return "copied"


def describe(conversion: Conversion, write: Callable[[str], None]) -> None:
    write(f"family   {conversion.family}, {conversion.after.num_layers} layers")
    write(f"wiring   {conversion.before.spec} -> {conversion.after.spec}   {conversion.after.picture()}")
    write(f"weights  {', '.join(conversion.weights)} ({conversion.placed}, unchanged)")
    write(f"kept     {', '.join(conversion.kept) or 'nothing else'}")
    write(f"written  {conversion.target}")
