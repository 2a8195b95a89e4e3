"""Where a model's shape comes from: a preset, a directory with config.json, or a hub id (only config.json is fetched)."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from ..presets import ModelShape, presets

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
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name, shape_of_config(_from_hub(name))
    matches = difflib.get_close_matches(name.lower(), presets(), n=3, cutoff=0.4)
    hint = f"; near: {', '.join(matches)}" if matches else ""
    raise ValueError(
        f"unknown model {name!r}{hint}; give a preset ({', '.join(presets())}), a directory with config.json, "
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


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        matches = difflib.get_close_matches(name.split("/")[1].lower(), presets(), n=3, cutoff=0.4)
        hint = f"; near presets: {', '.join(matches)}" if matches else ""
        raise ValueError(f"cannot fetch config.json of {name!r} from the hub ({type(error).__name__}){hint}") from error
