"""Rewire a checkpoint on disk: its ``config.json`` changes, its weights do not, unless they are to be quantised.

Weights are linked (or copied) as they are, so converting takes seconds at any size. A new target appears whole or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.config import AUTHORS_KEY, CONFIG_KEY, Wiring
from .adapter import ADAPTER_CONFIG, Adapter, is_adapter
from .checkpoint_reader import INDEX, Checkpoint, check_contained, has_tokenizer, resolve
from .checkpoint_writer import check_replaceable, new_directory, rewrite_weights
from .families import Family, check_wiring
from .hf_config import STUB, auto_map, class_name, stub_text
from .preflight import CheckedSource, check_source
from .quantization.checkpoint import QuantizedCheckpoint
from .quantization.rounding import Rounded
from .quantization.write import checked_format, config_of, write_quantized

if TYPE_CHECKING:
    from torch import Tensor

REFIT_KEY = "refitted_for"  # the wiring whose modules the weights were fitted to
_BASE_ARCHITECTURES = "base_architectures"  # what the checkpoint was called before, so that the way back is exact
# What goes along with the weights: tokenizer, templates, generation settings and texts; never code, never hidden files.
_KEPT = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".md")
_KEPT_NAMES = ("LICENSE", "NOTICE")
_OF_A_TOKENIZER = re.compile(
    r"tokenizer|special_tokens|added_tokens|vocab\.|merges\.|tekken|chat_template|.*\.(?:jinja|model|tiktoken)$"
)
_SKIP = ("config.json", INDEX, ADAPTER_CONFIG)


@dataclass(frozen=True)
class Conversion:
    """What was done."""

    target: Path
    family: str
    before: Wiring
    after: Wiring
    weights: list[str]
    placed: str  # "linked", "copied", "refitted", "merged" or "quantised"
    kept: list[str]  # tokenizer and other files taken along
    format: str | None = None  # what the weights were quantised to
    quantised_bytes: tuple[int, int] | None = None  # of the weights, before and after


def convert(
    source: str | Path,
    target: str | Path,
    wiring: str | Wiring | None = None,
    *,
    copy: bool = False,
    overwrite: bool = False,
    quantize: str | None = None,
    refitted: Mapping[str, Tensor | Rounded] | None = None,
) -> Conversion:
    """Write a checkpoint with another wiring: its config changes, its weights stay, also where they are quantised.

    The result loads with transformers' Auto classes after ``import ladder_residual``. It computes something else than the original,
    so it needs a short training to recover (``adapt``).

    Args:
        source: Checkpoint directory or hub id; or a LoRA adapter, which is merged into its base.
        target: Directory to write. It appears whole or not at all.
        wiring: ``"ladder"``, ``"ladder:last-half"``, ``"ladder:16-31"``, ``"desync-2x"`` ...; ``"standard"`` is the way back.
            ``select_layers`` finds the layers that cost least.
        copy: Copy the weights instead of linking them.
        overwrite: Replace a checkpoint that is there.
        quantize: ``"fp8"`` or ``"int4"`` rounds the layers' projections to the nearest number: E4M3 with a scale per output row, or
            4 bits with a scale per group of 128 columns (64, 32). The wiring may then be left out, and stays as it is.
        refitted: Weights to write instead of the checkpoint's, by name. ``refit`` computes them, and rounds with less loss.

    Returns:
        What was done: ``target``, ``family``, the wirings ``before`` and ``after``, and the files.

    Raises:
        ValueError: If the family is not supported, the wiring does not fit the model, or the target exists.

    Examples:
        >>> conversion = convert("stories", "stories-last-half", "ladder:last-half")
        >>> conversion.before.spec, conversion.after.spec, conversion.placed
        ('standard', 'ladder:3-4', 'linked')
    """
    target = Path(target).resolve()
    if wiring is None and quantize is None and not is_adapter(resolve(source)):
        raise ValueError("nothing to convert: give a wiring (ladder, ladder:last-half ...), quantize (fp8, int4), or both")
    found = check_source(source)
    checkpoint, family, before = found.checkpoint, found.family, found.wiring
    directory = checkpoint.directory.resolve()
    format = checked_format(found, quantize) if quantize is not None else None
    wiring = before if wiring is None else wiring
    after = Wiring.parse(wiring.spec if isinstance(wiring, Wiring) else wiring, before.num_layers)
    check_wiring(family, after)
    before.check_same_weights(after)
    refitted_for = checkpoint.config.get(REFIT_KEY)
    if refitted_for is not None and after != before:
        raise ValueError(
            f"the weights of {source} were refitted for wiring {refitted_for}: convert the original to {after.spec}"
        )
    for read in {directory, found.adapter.directory} if found.adapter else {directory}:
        check_target(read, target, overwrite)
    from .loading import meta_model  # not at the top: what is refused before needs no torch
    from .parameters import check_parameters

    model = meta_model(found)
    check_parameters(model, checkpoint)
    merge = merging(found, model) if found.adapter else None
    checkpoint.close()
    weights = sorted(set(checkpoint.files.values()))
    kept, index = _files_along_of(found), [INDEX] if (directory / INDEX).exists() else []
    check_contained(checkpoint.directory, ["config.json", *weights, *index])
    sizes: tuple[int, int] | None = None
    with new_directory(target, overwrite=overwrite) as written:
        config = rewired_config(checkpoint.config, family, after)
        if refitted is not None and after.kind != "standard":
            config[REFIT_KEY] = after.spec
        if format is not None:
            methods = {"quantised"}
            rounded = {stored: new for stored, new in _by_stored_name(refitted or {}, checkpoint) if isinstance(new, Rounded)}
            sizes = write_quantized(checkpoint, written, format, merge or (lambda name, old: old), rounded)
            config["quantization_config"] = config_of(checkpoint, format)
            checkpoint.close()
        elif refitted is not None:
            methods = {"refitted"}
            new = as_stored(refitted, checkpoint)
            rewrite_weights(checkpoint, written, lambda name, old: {name: new(name, old)})
            checkpoint.close()
        elif merge is not None:
            methods = {"merged"}
            rewrite_weights(checkpoint, written, lambda name, old: {name: merge(name, old)})
            checkpoint.close()
            config.pop("quantization_config", None)
        else:
            place = written.copy if copy else written.link
            methods = {place(directory / name, name) for name in weights}
            for name in index:
                written.copy(directory / name, name)
        for name, path in sorted(kept.items()):
            written.copy(path, name)
        written.write("config.json", json.dumps(config, indent=2) + "\n")
        if after.kind != "standard":
            written.write(STUB, stub_text())
    placed = "copied" if "copied" in methods else methods.pop()
    to = format.describe() if format is not None else None
    return Conversion(target, family.model_type, before, after, weights, placed, sorted(kept), to, sizes)


def _by_stored_name(weights: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """ValueError if one of ``weights`` has no place in the checkpoint."""
    from .parameters import stored_tensors

    for name, weight in weights.items():
        shape = weight.numbers.shape if isinstance(weight, Rounded) else weight.shape
        yield stored_tensors(checkpoint, name, tuple(shape))[0][0], weight


def as_stored(weights: Mapping[str, Any], checkpoint: Checkpoint) -> Callable[[str, Tensor], Tensor]:
    """What stands in the checkpoint under a name instead of ``old``."""
    from .finite import cast_finite

    stored = dict(_by_stored_name(weights, checkpoint))
    return lambda name, old: cast_finite(name, stored[name], old.dtype).to(old.device) if name in stored else old


def merging(found: CheckedSource, model: Any) -> Callable[[str, Tensor], Tensor]:
    """What stands under a name instead of ``old`` once the adapter is merged: plain numbers."""
    import torch

    from .finite import cast_finite
    from .parameters import stored_tensors

    assert found.adapter is not None
    adapter, checkpoint, plain = Adapter(found.adapter), found.checkpoint, getattr(torch, found.dtype)
    adapter.check(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = {stored_tensors(checkpoint, name, shapes[name])[0][0]: name for name in adapter.pairs}
    weights = checkpoint.weights if isinstance(checkpoint, QuantizedCheckpoint) else {}

    def merged(name: str, old: Tensor) -> Tensor:
        return cast_finite(name, adapter.added(names.get(name, ""), old, None), plain if name in weights else old.dtype)

    return merged


def files_along(directory: Path) -> list[str]:
    """Tokenizer, chat template, notices: what a checkpoint made from this one gets of it. ValueError if one is a link that leaves it."""
    names = sorted(path.name for path in directory.iterdir() if _goes_along(path))
    check_contained(directory, names)
    return names


def _files_along_of(found: CheckedSource) -> dict[str, Path]:
    """An adapter's own tokenizer and templates are the ones that generate reads: they replace those of its base."""
    directory = found.checkpoint.directory
    files = {name: directory / name for name in files_along(directory)}
    if found.adapter is None:
        return files
    adapter = found.adapter.directory
    if has_tokenizer(adapter):
        files = {name: path for name, path in files.items() if not _OF_A_TOKENIZER.match(name)}
    return files | {name: adapter / name for name in files_along(adapter) if _OF_A_TOKENIZER.match(name)}


def _goes_along(path: Path) -> bool:
    if not path.is_file() or path.name in _SKIP or path.name.startswith("."):
        return False
    return path.suffix in _KEPT or path.name in _KEPT_NAMES


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
    return plain | {
        "model_type": family.ladder_type,
        "architectures": [class_name(family.model_type, "ForCausalLM")],
        "auto_map": auto_map(family.model_type),
        CONFIG_KEY: wiring.spec,
        _BASE_ARCHITECTURES: base,
    }


def check_target(source: str | Path, target: str | Path, overwrite: bool = False) -> None:
    """ValueError where ``convert`` would refuse to write; for callers that have minutes of work before it."""
    target = Path(target).resolve()
    _check_apart(resolve(source).resolve(), target, overwrite)
    check_replaceable(target, overwrite)


def _check_apart(source: Path, target: Path, overwrite: bool) -> None:
    if target == source:
        raise ValueError(f"source and target are the same directory ({target}); choose another target")
    if overwrite and target in source.parents:
        raise ValueError(
            f"{target} contains the source {source}: overwriting it would delete the source; choose another target"
        )


def describe(conversion: Conversion, write: Callable[[str], None]) -> None:
    write(f"family   {conversion.family}, {conversion.after.num_layers} layers")
    change = " -> ".join(dict.fromkeys((conversion.before.spec, conversion.after.spec)))
    write(f"wiring   {change}   {conversion.after.picture()}")
    state = conversion.placed if conversion.placed in ("refitted", "merged") else f"{conversion.placed}, unchanged"
    if conversion.quantised_bytes:
        before, after = (size / 2**20 for size in conversion.quantised_bytes)
        state = f"{conversion.format}, {before:,.1f} -> {after:,.1f} MiB"
    write(f"weights  {', '.join(conversion.weights)} ({state})")
    write(f"kept     {', '.join(conversion.kept) or 'nothing else'}")
    write(f"written  {conversion.target}")
