"""Where a model's shape comes from: a preset, a directory with config.json, or a hub id (only config.json is fetched)."""

from __future__ import annotations

from pathlib import Path

from ..common.suggest import did_you_mean
from ..models.checkpoint_reader import read_json
from ..models.hub import fetch, may_be_hub_id
from ..models.presets import ModelShape, presets
from ..models.quantization.spec import read_spec

MIXTURES = "the planner reads those of mixtral, qwen2_moe and qwen3_moe"
# Fields that mean a decoder whose cost this model does not describe; better refused than priced wrongly.
UNSUPPORTED = {
    "mlp_only_layers": "a mixture with dense layers between",
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
    short, file = _config_file(name)
    return short, shape_of_config(file)


def stored_weights(name: str) -> str:
    """How a model's layers are stored: bf16, or what they are quantised to."""
    if name in presets():
        return "bf16"
    _, file = _config_file(name)
    config = read_json(file)
    try:
        spec = read_spec(config, file)
    except ValueError as error:  # what cannot be loaded can still be planned
        raise ValueError(f"{error}; or give --weights") from None
    return spec.format if spec else "bf16"


def _config_file(name: str) -> tuple[str, Path]:
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{path} has no config.json")
        return path.name if path.is_dir() else path.stem, file
    if may_be_hub_id(name):
        try:
            return name, fetch(name, ["config.json"]) / "config.json"
        except ValueError as error:
            raise ValueError(f"{error}{did_you_mean(name, presets())}") from error
    raise ValueError(
        f"unknown model {name!r}{did_you_mean(name, presets())}; give a preset ({', '.join(presets())}), a directory with config.json, "
        "or a hub id owner/name"
    )


def shape_of_config(file: Path) -> ModelShape:
    config = read_json(file)
    for key, what in UNSUPPORTED.items():
        if config.get(key):
            raise ValueError(f"{file}: {key} says this is {what}; the planner knows decoders whose layers are alike")
    try:
        shape = ModelShape.from_hf(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    for key in ("num_experts", "num_local_experts"):
        if config.get(key) and shape.experts is None:
            raise ValueError(f"{file}: {key} says this is a mixture of experts, whose sizes are not there; {MIXTURES}")
    if shape.experts and config.get("decoder_sparse_step", 1) != 1:
        step = config["decoder_sparse_step"]
        raise ValueError(
            f"{file}: decoder_sparse_step={step!r:.20} puts dense layers between; the planner knows layers that are alike"
        )
    return shape
