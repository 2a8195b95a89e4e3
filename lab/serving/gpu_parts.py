"""What ``lab.serving.gpu`` runs: engines, what is measured of them, and checkpoints for both."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.serving.gpu_judge import SMALL, Judge, write_small
from ladder_residual.models.presets import ModelShape

OWN = "own"  # vLLM's own model
CAPTURED = [1, 16, 64, 256]  # token counts of CUDA graphs
# A rank of TP=8 of the 70B shape, as a model of its own.
RANK_OF_70B = {"num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 3584}


@dataclass(frozen=True)
class Engine:
    name: str
    wiring: str = OWN
    tp: int = 1
    transport: str | None = None
    model: str = "llama-3.1-8b"
    overlap: str | None = None  # VLLM_LADDER_OVERLAP
    gigabytes: float = 24.0  # of the card, all ranks
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.overlap is None else {"VLLM_LADDER_OVERLAP": self.overlap}

    def arguments(self, folder: Path) -> dict[str, Any]:
        """Of vLLM's ``LLM``."""
        arguments: dict[str, Any] = {
            "model": str(folder / self.model),
            "dtype": "bfloat16",
            "seed": 0,
            "skip_tokenizer_init": True,
            "max_model_len": 2048,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "gpu_memory_utilization": 0.05,  # what must be free; the cache's size is given
            "kv_cache_memory_bytes": 5 * 10**9 // self.tp,
            "compilation_config": {"cudagraph_capture_sizes": CAPTURED},
            "kernel_config": {"enable_cutedsl_warmup": False, "enable_flashinfer_autotune": False},
            "tensor_parallel_size": self.tp,
        }
        if self.model not in SMALL:
            arguments["load_format"] = "dummy"
        if self.wiring != OWN:
            arguments["hf_overrides"] = {"wiring": self.wiring}
        if self.tp > 1:
            arguments["distributed_executor_backend"] = "mp"
            arguments["disable_custom_all_reduce"] = self.transport == "nccl"
        return arguments | self.options

    def described(self) -> dict[str, Any]:
        graphs = self.options.get("compilation_config", {}).get("cudagraph_mode")  # None: vLLM's choice
        described = {"wiring": self.wiring, "tp": self.tp, "transport": self.transport, "model": self.model}
        return described | {"overlap": self.overlap} | ({"graphs": graphs} if graphs else {})


@dataclass(frozen=True)
class Measurement:
    name: str
    request: dict[str, Any]
    seconds: float  # of one engine's, about
    before: tuple[dict[str, Any], ...] = ()
    rounds: int | None = None  # instead of those asked for

    def described(self) -> dict[str, Any]:
        numbers = {key: value for each in (*self.before, self.request) for key, value in each.items() if key != "do"}
        return {"name": self.name, **numbers}


@dataclass(frozen=True)
class Part:
    name: str
    engines: list[Engine]
    measurements: list[Measurement] = field(default_factory=list)
    judge: Judge | None = None


def decode(batch: int, seconds: float, prompt: int = 256, new_tokens: int = 48) -> Measurement:
    request = {"do": "decode", "batch": batch, "prompt": prompt, "new_tokens": new_tokens}
    return Measurement(f"batch {batch}", request, seconds)


def first_token(prompt: int, seconds: float) -> Measurement:
    return Measurement(f"first token, {prompt}", {"do": "first_token", "prompt": prompt}, seconds)


TABLE = [decode(1, 0.6), decode(16, 1.6), first_token(256, 0.1), first_token(1024, 0.3), decode(64, 4.5)]


def load(rate: float, requests: int = 32) -> Measurement:
    request = {"do": "load", "rate": rate, "requests": requests, "prompt": 256, "new_tokens": 64}
    return Measurement(f"load {rate:g}/s", request, requests / rate + 3, rounds=1)


LOADS = [load(rate) for rate in (4, 8, 16)]


def pair(transport: str, tp: int = 2) -> list[Engine]:
    gigabytes = 24.0 if tp == 1 else 27.0
    return [
        Engine(f"{transport}-own", OWN, tp, transport if tp > 1 else None, gigabytes=gigabytes),
        Engine(f"{transport}-ladder", "ladder", tp, transport if tp > 1 else None, gigabytes=gigabytes),
    ]


def with_overlap(transport: str) -> list[Engine]:
    """Both ways of the plugin beside its own choice."""
    return [Engine(f"{transport}-{mode}", "ladder", 2, transport, overlap=mode, gigabytes=27.0) for mode in ("always", "never")]


def with_graphs_for_decode_only() -> list[Engine]:
    """Prompts outside CUDA graphs, where both all-reduces of a layer can run beside its modules."""
    graphs = {"compilation_config": {"cudagraph_capture_sizes": CAPTURED, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    facts: dict[str, Any] = {"tp": 2, "transport": "nccl", "gigabytes": 27.0, "options": graphs}
    return [Engine("decode-graphs-own", **facts), Engine("decode-graphs-ladder", "ladder", **facts)]


def emulated() -> list[Engine]:
    facts: dict[str, Any] = {"transport": "emulated", "model": "rank-of-70b", "gigabytes": 24.0}
    facts["options"] = {"kv_cache_memory_bytes": 2 * 10**9}
    return [
        Engine("emulated-own", **facts),
        Engine("emulated-always", "ladder", overlap="always", **facts),
        Engine("emulated-never", "ladder", overlap="never", **facts),
    ]


def delayed(microseconds: float, batch: int) -> Measurement:
    request = {"do": "decode", "batch": batch, "prompt": 64, "new_tokens": 32}
    before = ({"do": "set_delay", "microseconds": microseconds},)
    return Measurement(f"{microseconds} us, batch {batch}", request, 0.8, before)


SMALL_OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 10**9,
    "compilation_config": {"cudagraph_capture_sizes": [1, 8, 64]},
}


# Graphs that end at attention: half of the all-reduces run beside the modules.
PIECEWISE = SMALL_OPTIONS | {
    "compilation_config": SMALL_OPTIONS["compilation_config"] | {"cudagraph_mode": "PIECEWISE"},
}


def small(name: str, wiring: str = OWN, tp: int = 1, transport: str | None = None, **facts: Any) -> Engine:
    return Engine(name, wiring, tp, transport, gigabytes=3.0 * tp, **({"model": "small", "options": SMALL_OPTIONS} | facts))


def quantised(model: str) -> list[Engine]:
    return [
        small(f"{model}-own", model=model),
        small(f"{model}-ladder", "ladder", model=model),
        small(f"{model}-own-ipc", tp=2, transport="ipc", model=model),
        small(f"{model}-ladder-ipc", "ladder", 2, "ipc", model=model),
    ]


# In the order of their importance.
PARTS = {
    part.name: part
    for part in (
        Part("nccl", pair("nccl"), TABLE + LOADS[1:]),
        Part("ipc", pair("ipc"), TABLE),
        Part("tp1", pair("tp1", tp=1), TABLE),
        Part(
            "parity",
            [
                small("parity-own"),
                small("parity-ladder", "ladder"),
                small("parity-own-ipc", tp=2, transport="ipc"),
                small("parity-ladder-ipc", "ladder", 2, "ipc", overlap="always"),
                small("parity-ladder-nccl", "ladder", 2, "nccl", overlap="always"),
                small("parity-in-line", "ladder", 2, "ipc", overlap="never"),
                small("parity-piecewise", "ladder", 2, "ipc", overlap="always", options=PIECEWISE),
            ],
            judge=Judge(),
        ),
        Part("nccl-overlap", with_overlap("nccl"), TABLE),
        Part("ipc-overlap", with_overlap("ipc"), TABLE),
        Part("load", pair("nccl"), LOADS),
        Part("nccl-graphs", with_graphs_for_decode_only(), [first_token(64, 0.1), first_token(256, 0.1), decode(16, 1.6)]),
        Part("emulated", emulated(), [delayed(us, batch) for batch in (1, 16) for us in (5, 18, 24, 64)]),
        Part("fp8", quantised("small-fp8"), judge=Judge()),
        Part("int4", quantised("small-int4"), judge=Judge()),
        Part(
            "wirings",
            [
                small("wirings-hybrid", "ladder:last-half", 2, "ipc", overlap="always"),
                small("wirings-delayed", "delayed-1", 2, "ipc", overlap="always"),
                small("wirings-parallel", "parallel", 2, "ipc", overlap="always", model="small-parallel"),
            ],
            judge=Judge(),
        ),
    )
}


def write_checkpoints(folder: Path, parts: Iterable[Part]) -> None:
    """What the engines of these parts load."""
    for model in sorted({engine.model for part in parts for engine in part.engines}):
        target = folder / model
        if target.exists():
            continue
        if model in SMALL:
            write_small(folder, model)
        else:
            target.mkdir()
            name, changed = ("llama-3-70b", RANK_OF_70B) if model == "rank-of-70b" else (model, {})
            (target / "config.json").write_text(json.dumps(_config(ModelShape.from_name(name)) | changed))


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "model_type": shape.family,
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
