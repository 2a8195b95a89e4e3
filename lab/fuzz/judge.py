"""What an accepted input should have meant, computed without the reader that accepted it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENS = torch.tensor([[1, 17, 300, 41, 9, 77, 5, 200], [1, 2, 3, 4, 500, 6, 7, 8]])


class SilentError(AssertionError):
    """An input was accepted, and something else was computed than it says."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise SilentError(what)


@torch.no_grad()
def check_model(model: Any, directory: Path, wiring: str | None = None, dtype: torch.dtype | None = None) -> None:
    """``model`` was loaded from ``directory``: weights and logits must be those of plain transformers with the tensors of the files."""
    expected = plain_model(directory, wiring, dtype or model.dtype)
    weights = dict(model.named_parameters())
    for name, tensor in expected.named_parameters():
        require(name in weights and same_bits(weights[name], tensor), f"{name} is not what the files hold")
    ours, theirs = model(TOKENS).logits.float(), expected(TOKENS).logits.float()
    scale = theirs[theirs.isfinite()].abs().max().item() if theirs.isfinite().any() else 1.0
    tolerance = scale * (1e-4 if model.dtype == torch.float32 else 5e-2)
    close = torch.allclose(ours, theirs, rtol=0, atol=tolerance, equal_nan=True)
    require(close, f"logits differ from transformers' by {(ours - theirs).abs().max():.3g} of {scale:.3g}")


def plain_model(directory: Path, wiring: str | None, dtype: torch.dtype) -> Any:
    """Built and filled by transformers and torch alone; only the wiring, which transformers has not, is ours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ladder_residual import rewire
    from ladder_residual.core.config import Wiring

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    spec = wiring or Wiring.from_config(config, config["num_hidden_layers"]).spec
    fields = {key: value for key, value in config.items() if key not in ("model_type", "auto_map", "wiring", "ladder_layers")}
    plain = AutoConfig.for_model(config["model_type"].removeprefix("ladder_"), **fields)
    model = AutoModelForCausalLM.from_config(plain, dtype=dtype)
    names = model.state_dict().keys()
    tensors = {name if name in names else f"model.{name}": tensor.to(dtype) for name, tensor in stored(directory).items()}
    left = model.load_state_dict(tensors, strict=False)
    missing = [name for name in left.missing_keys if not (plain.tie_word_embeddings and name == "lm_head.weight")]
    require(not missing, f"accepted without {missing[:3]}")
    if plain.tie_word_embeddings:
        model.lm_head.weight = model.get_input_embeddings().weight
    return rewire(model, spec).eval()


def stored(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by the file that its index names."""
    from safetensors.torch import load_file

    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load_file(directory / "model.safetensors")
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    files = {file: load_file(directory / file) for file in set(places.values())}
    return {name: files[file][name] for name, file in places.items()}


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[theirs.element_size()]
    return ours.dtype == theirs.dtype and torch.equal(ours.detach().view(whole), theirs.detach().view(whole))


def check_values(found: Any, asked: Any, where: str = "") -> None:
    """Everything that ``asked``, a document, says is in ``found``; lists may have become tuples, whole numbers floats."""
    if isinstance(asked, dict) and isinstance(found, dict):
        for key, value in asked.items():
            require(key in found, f"{where}{key} was left out")
            check_values(found[key], value, f"{where}{key}.")
    elif isinstance(asked, list) and isinstance(found, list | tuple):
        require(len(found) == len(asked), f"{where} has {len(found)} of {len(asked)} values")
        for number, (ours, theirs) in enumerate(zip(found, asked, strict=True)):
            check_values(ours, theirs, f"{where}{number}.")
    else:
        equal = found == asked or (found != found and asked != asked)
        require(equal, f"{where.rstrip('.')} is {found!r:.60}, the file says {asked!r:.60}")
