"""Run vLLM engines one after the other in a process of their own: `python engines.py JOBS.json RESULTS.json`.

A job names a checkpoint, vLLM's options and prompts; its result is the tokens, or the error that refused it. Importing vLLM takes
longer than a tiny engine's whole life, so jobs share a process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 1200


def run_jobs(folder: Path, jobs: dict[str, dict[str, Any]], ranks: int = 1) -> dict[str, dict[str, Any]]:
    """Results by job. ``ranks``: of the largest job, for binding them to cores."""
    stem = folder / f"jobs-{ranks}-{time.time_ns()}"
    given, found, log = stem.with_suffix(".json"), stem.with_suffix(".results.json"), stem.with_suffix(".log")
    given.write_text(json.dumps(jobs))
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, __file__, str(given), str(found)],
            env=environment(folder, ranks),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(TIMEOUT_SECONDS)
        finally:
            end_group(process)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    assert found.exists(), f"the engines left no results; their log ends:\n{tail}"
    results = json.loads(found.read_text())
    for result in results.values():
        result.setdefault("log", tail)
    return results


def environment(folder: Path, ranks: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are sent to the ranks
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Nothing a test started outlives it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    with environment_of(job.get("environment", {})):
        return run_engine(job)


@contextlib.contextmanager
def environment_of(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = {"max_model_len": 256, "max_num_seqs": 8, "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True}
    llm = LLM(job["model"], **(options | job.get("engine", {})))
    sampling = SamplingParams(temperature=0, max_tokens=job.get("new_tokens", 24), ignore_eos=True, detokenize=False)
    inputs: list[Any] = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    lora = LoRARequest("adapter", 1, job["lora"]) if "lora" in job else None
    try:
        # As one batch, but for the last ``in_turn`` of them: a later prompt is to find an earlier one's cache.
        together = len(inputs) - job.get("in_turn", 0)
        batches = [batch for batch in (inputs[:together], *([one] for one in inputs[together:])) if batch]
        answers = [answer for batch in batches for answer in llm.generate(batch, sampling, lora_request=lora, use_tqdm=False)]
        ops = _count_ops(llm, inputs, sampling) if job.get("count_ops") else None
        counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()} if job.get("metrics") else {}
    finally:
        llm.llm_engine.engine_core.shutdown()
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "ends": [answer.outputs[0].finish_reason for answer in answers],
        "cached": [answer.num_cached_tokens for answer in answers],
        "preemptions": counters.get("vllm:num_preemptions"),
        "architectures": llm.llm_engine.vllm_config.model_config.architectures,
        "ops": ops,
    }


def _count_ops(llm: Any, inputs: list[Any], sampling: Any) -> int:
    """All ops that rank 0 runs while the prompts are answered once more: the same number on a busy machine as on a quiet one."""
    llm.collective_rpc(_start_profiler)
    llm.generate(inputs, sampling, use_tqdm=False)
    return llm.collective_rpc(_ops_since)[0]


def _start_profiler(worker: Any) -> None:
    import torch

    worker.ops_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    worker.ops_profiler.start()


def _ops_since(worker: Any) -> int:
    worker.ops_profiler.stop()
    return sum(event.count for event in worker.ops_profiler.key_averages())


def register_loaded_classes() -> None:
    """vLLM inspects a class it was given by name in a process of its own, 8 s each the first time; one it has loaded, at once.
    The server's tests go the whole way."""
    from vllm import ModelRegistry

    from ladder_residual.vllm_plugin import models

    loaded = {name: value for name, value in vars(models).items() if name.startswith("Ladder") and isinstance(value, type)}
    loaded |= {"LadderOlmo2ForCausalLM": models.UnservedForCausalLM, "LlamaForCausalLM": models.LlamaForCausalLM}
    for name, value in loaded.items():
        ModelRegistry.register_model(name, value)


def main() -> None:
    register_loaded_classes()
    jobs, results = json.loads(Path(sys.argv[1]).read_text()), {}
    for name, job in jobs.items():
        start = time.monotonic()
        try:
            results[name] = run_job(job)
        except Exception as error:  # a refusal is a result, and one broken job must not hide the others
            chain = [error]
            while chain[-1].__cause__ or chain[-1].__context__:
                chain.append(chain[-1].__cause__ or chain[-1].__context__)
            results[name] = {"error": "\n".join(f"{type(e).__name__}: {e}" for e in chain)}
        results[name]["seconds"] = round(time.monotonic() - start, 1)
        print(f"### {name}: {results[name]['seconds']} s", flush=True)
        gc.collect()
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
