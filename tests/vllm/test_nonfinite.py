"""Logits that overflow in float16 end their request and no other, in the engine and over HTTP; weights that do are refused."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from engines import environment, run_jobs

from lab.serving.servers import VLLM, Server, free_port, stop, wait_until_up
from ladder_residual.vllm_plugin.nonfinite import as_nan

HEALTHY = [[token if token != tiny.LOUD else 8 for token in prompt] for prompt in tiny.prompts(5, 17, 40, 33)]
LOUD = [[5, tiny.LOUD, 9, 11], [*range(8, 60), tiny.LOUD]]
NEW_TOKENS = 4
FLOAT16: dict[str, Any] = {"dtype": "float16"}


@pytest.fixture(scope="module")
def ladder(folder: Path) -> Path:
    return tiny.overflowing(folder / "overflowing", tiny.rewired(folder, "ladder"))


@pytest.fixture(scope="module")
def runs(folder: Path, ladder: Path) -> dict[str, dict[str, Any]]:
    # The last of them in turn, in blocks of the KV cache that the loud ones had.
    few_blocks = {"num_gpu_blocks_override": 12, "block_size": 32, "enable_prefix_caching": False}
    asked = {"model": str(ladder), "prompts": [*HEALTHY, *LOUD, *HEALTHY], "new_tokens": NEW_TOKENS, "in_turn": len(HEALTHY)}
    jobs: dict[str, dict[str, Any]] = {
        "float16": asked | {"engine": FLOAT16 | few_blocks},
        "float16, not counted": asked | {"engine": FLOAT16, "environment": {"VLLM_COMPUTE_NANS_IN_LOGITS": "0"}},
        "bfloat16": asked | {"engine": {"dtype": "bfloat16"}},
        "float16 on two ranks": asked | {"engine": FLOAT16 | few_blocks | {"tensor_parallel_size": 2, "enforce_eager": False}},
    }

    def infinite_logits(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["lm_head.weight"]
        head[9], head[10] = 30_000, -30_000

    def too_large(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = 1e5

    plain = folder / "llama-ladder"
    for name, edit in (("infinite", infinite_logits), ("too large", too_large)):
        model = tiny.edited(folder / name, plain, edit)
        jobs[name] = {"model": str(model), "prompts": HEALTHY, "new_tokens": NEW_TOKENS, "engine": FLOAT16}
    return run_jobs(folder, jobs, ranks=2)


@pytest.mark.parametrize("name", ["float16", "float16 on two ranks"])
def test_the_request_that_overflows_ends_and_no_other(runs: dict[str, dict[str, Any]], ladder: Path, name: str) -> None:
    run = runs[name]
    assert "error" not in run, run["error"] + run["log"]
    expected = tiny.greedy(ladder, HEALTHY, NEW_TOKENS)
    assert run["tokens"] == [*expected, *([] for _ in LOUD), *expected]
    assert run["ends"] == ["length"] * len(HEALTHY) + ["error"] * len(LOUD) + ["length"] * len(HEALTHY)


def test_what_the_message_advises_helps(runs: dict[str, dict[str, Any]]) -> None:
    assert set(runs["bfloat16"]["ends"]) == {"length"}


def test_vllm_alone_answers_with_token_0(runs: dict[str, dict[str, Any]]) -> None:
    """Why there is a check at all; and that the user's choice is kept."""
    run = runs["float16, not counted"]
    assert run["tokens"][len(HEALTHY)] == [0] * NEW_TOKENS
    assert "error" not in run["ends"]


def test_infinite_logits_are_no_numbers_either(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["infinite"]["ends"] == ["error"] * len(HEALTHY)


def test_a_weight_that_float16_cannot_hold_is_refused(runs: dict[str, dict[str, Any]]) -> None:
    said = "model.layers.2.mlp.up_proj.weight cannot be served in torch.float16; float16 overflows beyond 65504"
    assert said in runs["too large"].get("error", ""), runs["too large"]


def test_rows_of_drafts_are_not_mistaken_for_other_requests() -> None:
    """With drafts a request has several rows, and vLLM takes the first rows for those of the first requests."""
    logits = torch.zeros(4, 8)
    logits[3, 2] = math.nan
    assert as_nan(logits.clone(), all_rows=False).isnan().any(1).tolist() == [False, False, False, True]
    assert as_nan(logits.clone(), all_rows=True).isnan().all()
    masked = torch.full((2, 8), -math.inf, dtype=torch.float16)
    assert not as_nan(masked, all_rows=True).isnan().any()


@pytest.fixture(scope="module")
def server(folder: Path, ladder: Path) -> Iterator[tuple[Server, Path]]:
    port, log = free_port(), folder / "overflowing.log"
    tiny_and_quick = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8", "--dtype", "float16"]
    command = [*VLLM, "serve", str(tiny.with_tokenizer(ladder)), "--served-model-name", "loud", "--port", str(port)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, *tiny_and_quick],
            env=environment(folder, 1),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Server("loud", f"http://localhost:{port}", "loud", [], tokenizer=str(ladder), processes=[process])
    try:
        wait_until_up(running, log)
        yield running, log
    finally:
        stop(running.processes)


def test_the_client_gets_an_error_and_the_server_goes_on(server: tuple[Server, Path], ladder: Path) -> None:
    from openai import APIError, InternalServerError, OpenAI

    running, log = server
    client = OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=120, max_retries=0)
    body = {"ignore_eos": True, "return_token_ids": True}
    options: Any = {"model": "loud", "max_tokens": NEW_TOKENS, "temperature": 0, "extra_body": body}

    def ask(prompt: list[int]) -> Any:
        try:
            return client.completions.create(prompt=prompt, **options).choices[0].model_extra["token_ids"]
        except InternalServerError as error:
            return error.status_code

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, [*HEALTHY, *LOUD]))
    expected = tiny.greedy(ladder, HEALTHY, NEW_TOKENS)
    assert answers == [*expected, *[500] * len(LOUD)]
    with pytest.raises(APIError, match="Internal server error"):
        next(iter(client.completions.create(prompt=LOUD[0], stream=True, **options)))
    assert ask(HEALTHY[0]) == expected[0]
    said = log.read_text(errors="replace")
    assert f"its logits are NaN or infinite (model {ladder}, torch.float16; float16 overflows beyond 65504: try" in said
