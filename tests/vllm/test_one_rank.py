"""One rank: every family, the scheduler's features, adapters, quantisation, and what is refused. Tokens equal the package's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from engines import run_jobs
from safetensors.torch import load_file, save_file

from ladder_residual.models.loading import load_model
from ladder_residual.vllm_plugin import SERVED_FAMILIES

MIXED = (5, 17, 40)


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """All engines of this file, and the tokens expected of each."""
    jobs: dict[str, dict[str, Any]] = {}
    expected: dict[str, Any] = {}

    def add(name: str, model: Path, reference: Any = None, prompts: list[list[int]] | None = None, **job: Any) -> None:
        inputs = prompts or tiny.prompts(*MIXED)
        jobs[name] = {"model": str(model), "prompts": inputs, **job}
        expected[name] = tiny.greedy(reference or model, inputs)

    ladder = tiny.rewired(folder, "ladder")
    for family in SERVED_FAMILIES:
        add(family, tiny.rewired(folder, "ladder", family))
    add("hybrid", tiny.rewired(folder, "ladder:1-2"))
    # A parallel layer has one norm, so such a checkpoint is trained from scratch.
    add("parallel", tiny.plain(folder / "parallel", "ladder_llama", wiring="parallel:1-2"))
    add("delayed", tiny.rewired(folder, "delayed-2"))
    # Deep enough for torch's compiler to go wrong (vllm_plugin/inductor.py): from 6 layers on.
    add("compiled", tiny.rewired(folder, "ladder", layers=8), engine={"enforce_eager": False})
    overrides = {"architectures": ["LadderLlamaForCausalLM"], "wiring": "ladder:last-half"}
    last_half = tiny.rewired(folder, "ladder:last-half")
    add("overrides", folder / "llama", last_half, engine={"hf_overrides": overrides})
    # Both without vLLM's count of NaN, which is one for all rewired models.
    uncounted: dict[str, Any] = {"count_ops": True, "environment": {"VLLM_COMPUTE_NANS_IN_LOGITS": "0"}}
    add("no overrides", folder / "llama", **uncounted)
    # After the same checkpoint without it: vLLM remembers what it chose for a checkpoint and its architecture.
    add("override of the wiring alone", folder / "llama", last_half, engine={"hf_overrides": {"wiring": "ladder:last-half"}})
    add("authors' field", folder / "llama", last_half, engine={"hf_overrides": {"ladder_layers": 2}})
    saved = folder / "saved"
    load_model(ladder).save_pretrained(saved)
    add("written by save_pretrained", saved, ladder)
    for wiring in ("standard", "ladder", "desync-2x"):
        through_ours = {"architectures": ["LadderLlamaForCausalLM"], "wiring": wiring}
        add(f"ops of {wiring}", folder / "llama", engine={"hf_overrides": through_ours}, **uncounted)
        expected.pop(f"ops of {wiring}")
    # 12 blocks of 32 tokens: eight sequences of up to 64 + 24 tokens do not fit, some must give way and come back.
    small = {"num_gpu_blocks_override": 12, "block_size": 32, "disable_log_stats": False, "enable_prefix_caching": False}
    add("preemption", ladder, prompts=tiny.prompts(64, 60, 5, 33, 50, 61, 17, 58), engine=small, metrics=True)
    chunks = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "enable_chunked_prefill": True}
    add("chunked prefill", ladder, prompts=tiny.prompts(100, 7, 90), engine=chunks)
    caching = {"enable_prefix_caching": True, "block_size": 32}
    add("prefix caching", ladder, prompts=tiny.prompts(80, 90, 75, shared=70), engine=caching, in_turn=3)
    eight_bits = folder / "int8"
    add("int8", eight_bits, tiny.quantised(eight_bits, ladder))
    for name, source in (("fp8", ladder), ("fp8, vLLM's own model", folder / "llama")):
        in_fp8 = folder / f"{source.name}-fp8"
        add(name, in_fp8, tiny.quantised_by_convert(in_fp8, source))

    def refuse(name: str, model: Path, **job: Any) -> None:
        jobs[name] = {"model": str(model), "prompts": tiny.prompts(5), **job}

    too_deep = folder / "too-deep"
    tiny.convert(folder / "llama", too_deep, "ladder")
    config = json.loads((too_deep / "config.json").read_text())
    (too_deep / "config.json").write_text(json.dumps(config | {"wiring": "ladder:2-7"}))
    refuse("wiring of another depth", too_deep)
    refuse("desync of two ranks", tiny.rewired(folder, "desync-2x@2"))
    refuse("family that is not served", tiny.rewired(folder, "ladder", "olmo2"))
    wrong = {"architectures": ["LadderQwen3ForCausalLM"], "wiring": "ladder"}
    refuse("override of another family", folder / "llama", engine={"hf_overrides": wrong})
    ignoring = {"architectures": ["LlamaForSequenceClassification"], "wiring": "ladder"}
    refuse("architecture that would ignore the wiring", folder / "llama", engine={"hf_overrides": ignoring})
    refuse("override no wiring is made of", folder / "llama", engine={"hf_overrides": {"wiring": "lader"}})
    refuse("override of an unserved family", folder / "olmo2", engine={"hf_overrides": {"wiring": "ladder"}})
    refuse("parallel wiring of other weights", folder / "llama", engine={"hf_overrides": {"wiring": "parallel"}})
    inside = {"text_config": {"model_type": "llama", "num_hidden_layers": 4, "wiring": "ladder"}}
    refuse("wiring of a part", folder / "llama", engine={"hf_overrides": inside})
    not_vllms = {"model_impl": "transformers", "hf_overrides": {"wiring": "ladder"}}
    refuse("transformers' own model", folder / "llama", engine=not_vllms)
    unknown = folder / "unknown-quantisation"
    tiny.convert(folder / "llama", unknown, "ladder")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "seven-bits"}}))
    refuse("unknown quantisation", unknown)
    poisoned = folder / "poisoned"
    tiny.convert(folder / "llama", poisoned, "ladder", copy=True)
    weights = load_file(poisoned / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, poisoned / "model.safetensors", {"format": "pt"})
    refuse("a weight that is no number", poisoned)

    results = run_jobs(folder, jobs)
    for name, tokens in expected.items():
        results[name]["expected"] = tokens
    return results


SCHEDULER = ["preemption", "chunked prefill", "prefix caching"]
OTHERS = ["overrides", "override of the wiring alone", "authors' field", "written by save_pretrained"]
EXACT = [*SERVED_FAMILIES, "hybrid", "parallel", "delayed", "compiled", *SCHEDULER, *OTHERS]


@pytest.mark.parametrize("name", EXACT)
def test_tokens_equal_the_packages_own(runs: dict[str, dict[str, Any]], name: str) -> None:
    run = runs[name]
    assert "error" not in run, run["error"]
    assert run["tokens"] == run["expected"]
    assert run["architectures"][0].startswith("Ladder")


def test_a_plain_checkpoint_stays_vllms_own(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["no overrides"]
    assert run["tokens"] == run["expected"]
    assert run["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("wiring", ["standard", "ladder", "desync-2x"])
def test_one_rank_pays_nothing_for_a_wiring(runs: dict[str, dict[str, Any]], wiring: str) -> None:
    """There is nothing to reduce on one rank, so vLLM's own model runs no fewer ops."""
    assert 0 < runs[f"ops of {wiring}"]["ops"] <= runs["no overrides"]["ops"]


def test_sequences_were_preempted(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["preemption"]["preemptions"] > 0


def test_a_prefix_was_taken_from_the_cache(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["prefix caching"]["cached"] == [0, 64, 64]  # two blocks of 32 of the 70 tokens in common


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8, vLLM's own model"])
def test_eight_bit_weights_and_activations(runs: dict[str, dict[str, Any]], name: str) -> None:
    """Rounding an activation may fall to either side, so only the beginning of each answer is compared."""
    run = runs[name]
    assert "error" not in run, run["error"]
    assert [tokens[:4] for tokens in run["tokens"]] == [tokens[:4] for tokens in run["expected"]]


REFUSALS = {
    "wiring of another depth": "the model has 4 layers",
    "desync of two ranks": "run with tp=2",
    "family that is not served": "rewired olmo2 checkpoints are not served with vLLM: vLLM runs this family with",
    "override of another family": "the checkpoint is a llama",
    "architecture that would ignore the wiring": "which would ignore it",
    "override no wiring is made of": "did you mean 'ladder'",
    "override of an unserved family": "rewired olmo2 checkpoints are not served",
    "parallel wiring of other weights": "post_attention_layernorm.weight: the weights are of another wiring than parallel",
    "wiring of a part": "text_config asks for wiring ladder, which LlamaForCausalLM would ignore",
    "transformers' own model": "'LadderLlamaForCausalLM' is not a registered model in the Transformers library",
    "unknown quantisation": "seven-bits",
    "a weight that is no number": "model.layers.1.mlp.down_proj.weight holds NaN",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_the_reason(runs: dict[str, dict[str, Any]], name: str) -> None:
    assert REFUSALS[name] in runs[name].get("error", ""), runs[name]
