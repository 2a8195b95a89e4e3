"""One process of ``lab.serving.one_rank``: vLLM engines of all wirings, decoding the same prompts in turn.

python -m lab.serving.one_rank_worker JOB.json FOUND.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

OWN, AGAIN = "vllm", "vllm again"  # vLLM's own model, which takes part twice


def measure_engines(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm import LLM, SamplingParams

    from ladder_residual.models.checkpoint_reader import read_json
    from ladder_residual.models.families import family_of
    from ladder_residual.models.hf_config import class_name

    architecture = class_name(family_of(read_json(Path(job["model"]) / "config.json")).model_type, "ForCausalLM")
    engines = {}
    for name in job["order"]:
        overrides = {} if name in (OWN, AGAIN) else {"architectures": [architecture], "wiring": name}
        engines[name] = LLM(
            job["model"],
            hf_overrides=overrides,
            enforce_eager=job["eager"],
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=job["new_tokens"] + 32,
            block_size=128,
            max_num_seqs=job["batch"],
            num_gpu_blocks_override=8 + 2 * job["batch"],  # of 128 tokens; by default each engine would take a gigabyte
        )
    prompts: list[Any] = [{"prompt_token_ids": [number + 3] * 16} for number in range(job["batch"])]
    sampling = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)

    def decode(name: str) -> None:
        engines[name].generate(prompts, sampling, use_tqdm=False)

    found: dict[str, Any] = {name: {"ms": []} for name in engines}
    for name in engines:
        decode(name)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            decode(name)
        found[name]["ops"] = sum(event.count for event in profiler.key_averages()) / job["new_tokens"]
    for number in range(job["rounds"]):
        for name in list(engines)[:: 1 if number % 2 else -1]:
            cpu, wall = time.process_time(), time.perf_counter()
            decode(name)
            spent = (time.process_time() - cpu, time.perf_counter() - wall)
            found[name]["ms"].append([1e3 * seconds / job["new_tokens"] for seconds in spent])
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure_engines(json.loads(Path(sys.argv[1]).read_text()))))
