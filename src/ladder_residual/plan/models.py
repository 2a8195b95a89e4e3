"""Where a model's shape comes from: a preset, a directory with config.json, or a hub id (only config.json is fetched)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..common.suggest import did_you_mean
from ..models.hub import fetch, may_be_hub_id
from ..models.presets import ModelShape, presets

# Fields that mean a decoder whose cost this model does not describe; better refused than priced wrongly.
UNSUPPORTED = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
    "is_encoder_decoder": "an encoder-decoder",
    "vision_config": "a multimodal model",
    "ssm_cfg": "a state-space model",
}


def resolve_model(name: str) -> tuple[str, ModelShape]:
    """(a short name, the shape) of a preset, a local directory or ``config.json``, or ``owner/name`` on the hub."""
    if name in presets():
        return name, presets()[name]
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{path} has no config.json")
        return path.name if path.is_dir() else path.stem, shape_of_config(file)
    if may_be_hub_id(name):
        try:
            return name, shape_of_config(fetch(name, ["config.json"]) / "config.json")
        except ValueError as error:
            raise ValueError(f"{error}{did_you_mean(name, presets())}") from error
    raise ValueError(
        f"unknown model {name!r}{did_you_mean(name, presets())}; give a preset ({', '.join(presets())}), a directory with config.json, "
        "or a hub id owner/name"
    )


def shape_of_config(file: Path) -> ModelShape:
    try:
        config: Any = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not a readable JSON file: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, found {type(config).__name__}")
    for key, what in UNSUPPORTED.items():
        if config.get(key):
            raise ValueError(f"{file}: {key} says this is {what}; the planner knows dense decoders only")
    try:
        return ModelShape.from_hf(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
