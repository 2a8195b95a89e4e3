"""One vLLM engine that measures when it is told to; ``lab.serving.gpu`` starts several and asks them in turn.

python -m lab.serving.gpu_engine SOCKET    # the job comes over the socket, then requests
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

VOCABULARY = 512  # token ids of prompts; every model has as many


def main(address: str) -> None:
    with Client(address) as parent:
        job = parent.recv()
        try:
            started = time.monotonic()
            from vllm import LLM

            llm = LLM(**job)
            parent.send({"start_s": time.monotonic() - started})
        except BaseException as error:
            traceback.print_exc()
            parent.send({"message": f"{type(error).__name__}: {error}"})
            return
        while request := parent.recv():
            try:
                parent.send(REQUESTS[request.pop("do")](llm, **request))
            except Exception as error:
                traceback.print_exc()
                parent.send({"message": f"{type(error).__name__}: {error}"})


def decode(llm: Any, batch: int, prompt: int, new_tokens: int, seed: int) -> dict[str, Any]:
    """Milliseconds per token of ``batch`` sequences that decode together, once all have their first token."""
    prompts = [_prompt(prompt, seed * 1000 + number) for number in range(batch)]
    began = time.perf_counter()
    outputs = _generate(llm, prompts, new_tokens)
    wall = time.perf_counter() - began
    stats = [output.metrics for output in outputs]
    latest = max(stats, key=lambda each: each.first_token_ts)  # from then on all decode together
    first = latest.first_token_ts
    return {
        "ms": 1e3 * (latest.last_token_ts - first) / (new_tokens - 1),
        "all_first_ms": 1e3 * (first - min(each.scheduled_ts for each in stats)),
        "wall_s": wall,
    }


def first_token(llm: Any, prompt: int, seed: int) -> dict[str, Any]:
    """Milliseconds from a request to its only token."""
    prompts = [_prompt(prompt, seed)]
    began = time.perf_counter()
    _generate(llm, prompts, 1)
    return {"ms": 1e3 * (time.perf_counter() - began)}


def load(llm: Any, rate: float, requests: int, prompt: int, new_tokens: int, seed: int) -> dict[str, Any]:
    """Requests that arrive at random, ``rate`` a second: the median milliseconds per token of one, and tokens per second of all."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    chance, arrivals, due = random.Random(seed), [], 0.0
    for _ in range(requests):
        arrivals.append(due)
        due += chance.expovariate(rate)
    stats: list[Any] = []
    engine, sent, began = llm.llm_engine, 0, time.perf_counter()
    while len(stats) < requests:
        while sent < requests and time.perf_counter() - began >= arrivals[sent]:
            engine.add_request(f"{seed}-{sent}", {"prompt_token_ids": _prompt(prompt, 1000 * seed + sent)}, sampling)
            sent += 1
        if engine.has_unfinished_requests():
            stats += [output.metrics for output in engine.step() if output.finished]
        else:
            time.sleep(0.001)
    wall = time.perf_counter() - began
    times = [1e3 * (each.last_token_ts - each.first_token_ts) / (new_tokens - 1) for each in stats]
    firsts = [1e3 * each.first_token_latency for each in stats]
    return {
        "ms": statistics.median(times),
        "first_ms": statistics.median(firsts),
        "tokens_per_s": requests * new_tokens / wall,
    }


def tokens(llm: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Greedy tokens of prompts that run together."""
    return {"tokens": [list(output.outputs[0].token_ids) for output in _generate(llm, prompts, new_tokens)]}


def set_delay(llm: Any, microseconds: float) -> dict[str, Any]:
    """How long an emulated all-reduce takes from now on."""
    llm.collective_rpc(_set_delay, args=(microseconds,))
    return {}


def _set_delay(worker: Any, microseconds: float) -> None:
    from lab.serving.emulated_all_reduce import set_delay

    set_delay(microseconds)


REQUESTS: dict[str, Callable[..., dict[str, Any]]] = {
    "decode": decode,
    "first_token": first_token,
    "load": load,
    "tokens": tokens,
    "set_delay": set_delay,
}


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def _generate(llm: Any, prompts: list[list[int]], new_tokens: int) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    return llm.generate(inputs, sampling, use_tqdm=False)


if __name__ == "__main__":
    main(sys.argv[1])
