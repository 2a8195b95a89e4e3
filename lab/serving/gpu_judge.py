"""Whether an engine on a GPU says what float32 would: the share of its greedy tokens that the package's own model would choose.

Each token is judged after the engine's own tokens before it, so one token that differs does not make all later ones wrong. 16-bit
arithmetic alone costs a few; vLLM's own model of the same weights says how many.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ladder_residual.core.config import RANK_DEPENDENT, Wiring
from ladder_residual.distributed.call import call_on_ranks
from ladder_residual.distributed.world import distributed
from ladder_residual.models.convert import convert

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lab.serving.gpu_parts import Engine

VOCABULARY, HIDDEN, LAYERS = 512, 512, 6
SMALL = ("small", "small-parallel", "small-fp8", "small-int4")
QUANTISED = ("small-fp8", "small-int4")
PROMPTS = (7, 16, 33, 64, 100, 150, 230, 300)
NEW_TOKENS = 24
GROUP = 128  # weights of int4 that share a scale
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": GROUP,
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": None,
        }
    },
}


@dataclass(frozen=True)
class Judge:
    """Of a part whose engines answer the same prompts."""

    def request(self) -> dict[str, Any]:
        return {"do": "tokens", "prompts": prompts(), "new_tokens": NEW_TOKENS}

    def verdict(self, folder: Path, engines: Mapping[str, Engine], answers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """By engine: how many tokens are what float32 would choose, of how many."""
        found: dict[str, Any] = {}
        judges: dict[tuple[str, str], Any] = {}
        for name, answer in answers.items():
            if "message" in answer:
                found[name] = {"message": answer["message"]}
                continue
            engine = engines[name]
            key = (engine.model, "standard" if engine.wiring == "own" else engine.wiring)
            if engine.tp > 1 and Wiring.parse(key[1], LAYERS).kind in RANK_DEPENDENT:
                chosen = agreeing_on_ranks(folder / key[0], key[1], engine.tp, prompts(), answer["tokens"])
                found[name] = {"chosen": chosen, "of": len(PROMPTS) * NEW_TOKENS}
                continue
            if key not in judges:
                judges[key] = _float32(folder / (f"{key[0]}-judge" if key[0] in QUANTISED else key[0]), key[1])
            found[name] = {"chosen": agreeing(judges[key], prompts(), answer["tokens"]), "of": len(PROMPTS) * NEW_TOKENS}
        return found


def prompts() -> list[list[int]]:
    return [random.Random(length).choices(range(3, VOCABULARY), k=length) for length in PROMPTS]


@torch.inference_mode()
def agreeing(model: Any, given: list[list[int]], answers: list[list[int]]) -> int:
    """How many of the tokens the model would choose too."""
    count = 0
    for prompt, answer in zip(given, answers, strict=True):
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        count += int((logits.argmax(-1) == torch.tensor(answer)).sum())
    return count


def agreeing_on_ranks(directory: Path, wiring: str, ranks: int, given: list[list[int]], answers: list[list[int]]) -> int:
    """The same of a wiring that is another model on another number of ranks, which run here on the CPU."""
    asked: dict[str, Any] = {"directory": directory, "wiring": wiring, "given": given, "answers": answers, "device": "cpu"}
    return call_on_ranks(judge_as_rank, ranks, asked)


def judge_as_rank(directory: str, wiring: str, given: list[list[int]], answers: list[list[int]], device: str) -> int:
    from ladder_residual.models.loading import load_model

    with distributed(device) as world:
        return agreeing(load_model(directory, world, wiring=wiring, dtype="float32").eval(), given, answers)


def _float32(directory: Path, wiring: str) -> Any:
    from ladder_residual.models.loading import load_model

    return load_model(directory, wiring=wiring, dtype="float32").eval()


def write_small(folder: Path, name: str) -> None:
    """A checkpoint of random bf16 weights, as it is or quantised, and its weights as they are computed with."""
    tensors = _random_weights()
    config: dict[str, Any] = _config()
    if name == "small-parallel":  # a parallel layer has one norm
        tensors = {key: tensor for key, tensor in tensors.items() if "post_attention" not in key}
        config["wiring"] = "parallel"
    if name not in QUANTISED:
        _write(folder / name, config, tensors)
        return
    if name == "small-fp8":
        computed = _fp8(folder, name, config, tensors)
    else:
        computed, stored = _int4(tensors)
        _write(folder / name, config | {"quantization_config": INT4}, stored)
    _write(folder / f"{name}-judge", config, computed)


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    directory.mkdir()
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    (directory / "config.json").write_text(json.dumps(config))


def _config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // 64,
        "num_key_value_heads": HIDDEN // 128,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _random_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    key_value, inner = HIDDEN // 2, 2 * HIDDEN

    def normal(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * 1.2 / columns**0.5).bfloat16()

    def norm() -> Tensor:
        return (1 + 0.2 * torch.randn(HIDDEN, generator=generator)).bfloat16()

    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "lm_head.weight": normal(VOCABULARY, HIDDEN)}
    tensors["model.norm.weight"] = norm()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        sizes = {"q": (HIDDEN, HIDDEN), "k": (key_value, HIDDEN), "v": (key_value, HIDDEN), "o": (HIDDEN, HIDDEN)}
        tensors |= {f"{prefix}self_attn.{part}_proj.weight": normal(*size) for part, size in sizes.items()}
        tensors |= {f"{prefix}mlp.{part}_proj.weight": normal(inner, HIDDEN) for part in ("gate", "up")}
        tensors[f"{prefix}mlp.down_proj.weight"] = normal(HIDDEN, inner)
        tensors |= {f"{prefix}{part}_layernorm.weight": norm() for part in ("input", "post_attention")}
    return tensors


def _fp8(folder: Path, name: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Written as ``ladder convert --quantize fp8`` does; returns what is computed with."""
    _write(folder / f"{name}-plain", config, tensors)
    convert(folder / f"{name}-plain", folder / name, quantize="fp8")
    stored = load_file(folder / name / "model.safetensors")
    return {
        key: stored[key].float() * stored[f"{key}_scale"].float() if f"{key}_scale" in stored else stored[key]
        for key in tensors
    }


def _int4(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is computed with, and what compressed-tensors stores."""
    computed, stored = dict(tensors), dict(tensors)
    for key, weight in tensors.items():
        if "_proj.weight" in key:
            computed[key], parts = _packed(weight.float())
            del stored[key]
            stored |= {key.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    return computed, stored


def _packed(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A scale per row and group, eight values in an int32, the first in its lowest bits."""
    rows, columns = weight.shape
    groups = weight.view(rows, -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    values = (groups / scale).round().clamp(-8, 7)
    nibbles = (values + 8).long().view(rows, -1, 8)
    packed = (nibbles << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    shape = torch.tensor([rows, columns])
    parts = {"weight_packed": packed, "weight_scale": scale.squeeze(-1).bfloat16(), "weight_shape": shape}
    return (values * scale).view(rows, columns), parts
