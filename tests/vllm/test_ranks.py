"""Tensor and pipeline parallel: the tokens of several ranks equal the package's own. The compiled cases catch what a compiler may
do to a late wait without an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from engines import run_jobs
from reference_ranks import greedy_on_two_ranks

TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
TWO_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
COMPILED: dict[str, Any] = {"enforce_eager": False}
# Traced, then run as it is. With --enforce-eager vLLM 0.32 on CPU skips the dummy run that allocates a stage's receive buffers, and
# every model in stages, its own included, fails at the first request.
TRACED: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
PROMPTS = tiny.prompts(5, 17, 40, 3)
FAMILIES = (
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)  # beside Llama, and those with layers of another kind
# All the scheduler does, in one engine. A step takes 32 tokens, so longer prompts come in chunks. 11 blocks of 32 tokens are fewer than
# the crowd needs, so some sequences give way and come back. Prompts with one beginning then find it in the cache.
CROWDED: dict[str, Any] = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True, "enable_prefix_caching": True}
CROWDED |= {"num_gpu_blocks_override": 11, "block_size": 32, "disable_log_stats": False}
CROWD = tiny.prompts(64, 60, 5, 33, 50, 61, 17, 58)
ONE_BEGINNING = tiny.prompts(80, 90, 75, shared=70)


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = {}
    expected: dict[str, list[list[int]]] = {}

    def add(
        name: str, model: Path, engine: dict[str, Any], reference: Any = None, prompts: list[list[int]] = PROMPTS, **job: Any
    ) -> None:
        jobs[name] = {"model": str(model), "prompts": prompts, "engine": engine, **job}
        expected[name] = tiny.greedy(reference or model, prompts)

    ladder = tiny.rewired(folder, "ladder")
    # Biases of row-parallel projections are added once; layers 1 and 2 of four: both borders, and the stages' border, count.
    hybrid = tiny.rewired(folder, "ladder:1-2", attention_bias=True, mlp_bias=True)
    add("tp2 ladder eager", ladder, TWO_RANKS)
    # As deep as torch's compiler needs to go wrong on one rank (vllm_plugin/inductor.py): from 6 layers on.
    add("tp2 ladder compiled", tiny.rewired(folder, "ladder", layers=8), TWO_RANKS | COMPILED)
    add("tp2 hybrid compiled", hybrid, TWO_RANKS | COMPILED)
    for family in FAMILIES:
        add(f"tp2 {family}", tiny.rewired(folder, "ladder", family), TWO_RANKS)
    # Post-norms, and a stream that is handed on whole: both borders to layers of vLLM's own count.
    gemma2 = tiny.rewired(folder, "ladder:1-2", "gemma2")
    add("tp2 gemma2 hybrid compiled", gemma2, TWO_RANKS | COMPILED)
    add("tp2 granite hybrid", tiny.rewired(folder, "ladder:1-2", "granite"), TWO_RANKS)
    add("tp2 parallel", tiny.plain(folder / "parallel-ranks", "ladder_llama", wiring="parallel:1-2"), TWO_RANKS)
    # All-reduces in line with the modules, as on CUDA where they are fast.
    in_line = {"environment": {"VLLM_LADDER_OVERLAP": "never"}}
    add("tp2 in line ladder compiled", ladder, TWO_RANKS | COMPILED, **in_line)
    add("tp2 in line gemma2 hybrid", gemma2, TWO_RANKS, **in_line)
    add("tp2 pp2 in line hybrid traced", hybrid, TWO_RANKS | TWO_STAGES | TRACED, **in_line)
    for name, given in (("tp2 ops of vLLM's own", {}), ("tp2 ops in line", {"hf_overrides": {"wiring": "ladder"}})):
        uncounted = {"environment": in_line["environment"] | {"VLLM_COMPUTE_NANS_IN_LOGITS": "0"}}
        job = {"engine": TWO_RANKS | given, "count_ops": True, **uncounted}
        jobs[name] = {"model": str(folder / "llama"), "prompts": PROMPTS, **job}
    add("tp2 scheduler", ladder, TWO_RANKS | CROWDED, prompts=CROWD + ONE_BEGINNING, in_turn=len(ONE_BEGINNING), metrics=True)
    adapter = folder / "adapter"
    merged = tiny.lora_adapter(adapter, ladder)
    lora = TWO_RANKS | {"enable_lora": True, "max_lora_rank": tiny.LORA_RANK, "max_loras": 1}
    add("tp2 lora", ladder, lora, merged, lora=str(adapter))
    overrides = {"architectures": ["LadderLlamaForCausalLM"], "wiring": "standard"}
    add("tp2 standard", folder / "llama", TWO_RANKS | {"hf_overrides": overrides})
    add("pp2 hybrid traced", hybrid, TWO_STAGES | TRACED)
    add("pp2 hybrid compiled", hybrid, TWO_STAGES | COMPILED)
    # The stages' border lies between two ladder layers: what arrives there has its post-norm already.
    add("tp2 pp2 gemma2 hybrid traced", gemma2, TWO_RANKS | TWO_STAGES | TRACED)

    diverging = {
        "tp2 desync": tiny.rewired(folder, "desync-4x@2"),
        "tp2 no-comm": tiny.rewired(folder, "no-comm", "gemma2"),
        # Two all-reduces in flight. The standard layer waits for both, and so does the end.
        "tp2 delayed hybrid compiled": tiny.rewired(folder, "delayed-2:0,1,3@2"),
    }
    expected |= greedy_on_two_ranks(folder, diverging, PROMPTS)
    for name, model in diverging.items():
        compiled = COMPILED if name.endswith("compiled") else {}
        jobs[name] = {"model": str(model), "prompts": PROMPTS, "engine": TWO_RANKS | compiled}

    results = run_jobs(folder, jobs, ranks=4)
    for name, tokens in expected.items():
        results[name]["expected"] = tokens
    return results


EXACT = [
    "tp2 ladder eager",
    "tp2 ladder compiled",
    "tp2 hybrid compiled",
    *(f"tp2 {family}" for family in FAMILIES),
    "tp2 gemma2 hybrid compiled",
    "tp2 granite hybrid",
    "tp2 parallel",
    "tp2 in line ladder compiled",
    "tp2 in line gemma2 hybrid",
    "tp2 pp2 in line hybrid traced",
    "tp2 scheduler",
    "tp2 lora",
    "tp2 standard",
    "tp2 desync",
    "tp2 no-comm",
    "tp2 delayed hybrid compiled",
    "pp2 hybrid traced",
    "pp2 hybrid compiled",
    "tp2 pp2 gemma2 hybrid traced",
]


@pytest.mark.parametrize("name", EXACT)
def test_tokens_equal_the_packages_own(runs: dict[str, dict[str, Any]], name: str) -> None:
    run = runs[name]
    assert "error" not in run, run["error"] + run["log"]
    assert run["tokens"] == run["expected"]
    assert run["architectures"][0].startswith("Ladder")


def test_in_line_no_op_is_added_to_vllms_own_layer(runs: dict[str, dict[str, Any]]) -> None:
    """All-reduces included."""
    own, in_line = (runs[name] for name in ("tp2 ops of vLLM's own", "tp2 ops in line"))
    assert "error" not in in_line, in_line["error"] + in_line["log"]
    assert own["architectures"] == ["LlamaForCausalLM"]
    assert in_line["architectures"] == ["LadderLlamaForCausalLM"]
    assert 0 < in_line["ops"] <= own["ops"]


def test_the_scheduler_had_to_preempt_and_found_a_prefix(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["tp2 scheduler"]
    assert run["preemptions"] > 0
    assert run["cached"][-2:] == [64, 64]  # two blocks of 32 of the 70 tokens in common
