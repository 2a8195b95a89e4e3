"""The real server, two ranks, through the real client; and the server that must not start."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import guide
import pytest
import tiny
from engines import end_group, environment

from lab.serving.servers import VLLM, Server, free_port, stop, wait_until_up
from ladder_residual.generation.tokenizer import load_tokenizer

PROMPT = "Once upon a time"
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def typed(folder: Path) -> list[list[str]]:
    """The page's commands from a hub id to an answer: convert, serve, ask. The hub id is a tiny checkpoint here."""
    source = folder / "llama" if (folder / "llama").exists() else tiny.plain(folder / "llama")
    tiny.with_tokenizer(source)
    page = guide.commands("From a hub id to a served ladder model")[1:4]
    return [guide.words(command, **{guide.HUB_ID: str(source)}) for command in page]


@pytest.fixture(scope="module")
def checkpoint(folder: Path, typed: list[list[str]]) -> Path:
    subprocess.run(typed[0], cwd=folder, env=guide.with_programs(environment(folder, 1)), check=True)
    return folder / "served"


@pytest.fixture(scope="module")
def server(folder: Path, checkpoint: Path, typed: list[list[str]]) -> Iterator[Server]:
    port, log = free_port(), folder / "served.log"
    tiny_and_quick = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8", "--dtype", "float32"]
    command = [*typed[1], "--port", str(port), "--shutdown-timeout", "60", *tiny_and_quick]
    settings = guide.with_programs(environment(folder, 2))
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=folder, env=settings, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    running = Server("served", f"http://localhost:{port}", "served", [], tokenizer=str(checkpoint), processes=[process])
    try:
        wait_until_up(running, log)
        yield running
    finally:
        stop(running.processes)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def expected(checkpoint: Path, text: str, new_tokens: int = NEW_TOKENS, chat: bool = False) -> list[int]:
    tokenizer = load_tokenizer(checkpoint)
    written = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False) if chat else text
    return tiny.greedy(checkpoint, [tokenizer(written, add_special_tokens=not chat)["input_ids"]], new_tokens)[0]


def options(server: Server, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """Token ids are compared: random bytes, which a random model likes, have no text of their own."""
    body = {"ignore_eos": True, "return_token_ids": True}
    return {"model": server.model, "max_tokens": new_tokens, "temperature": 0, "extra_body": body}


def tokens_of(answer: Any) -> list[int]:
    return answer.choices[0].model_extra.get("token_ids") or []


def test_completion(client: Any, server: Server, checkpoint: Path) -> None:
    answer = client.completions.create(prompt=PROMPT, **options(server))
    assert tokens_of(answer) == expected(checkpoint, PROMPT)
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == NEW_TOKENS


def test_the_pages_request_is_answered(server: Server, checkpoint: Path, typed: list[list[str]]) -> None:
    asked = [word.replace("localhost:8000", server.url.removeprefix("http://")) for word in typed[2]]
    body = json.loads(asked[asked.index("-d") + 1])
    assert body["model"] == server.model
    greedy = json.dumps(body | {"temperature": 0, "ignore_eos": True, "return_token_ids": True})
    asked[asked.index("-d") + 1] = greedy
    done = subprocess.run([*asked, "--silent", "--fail"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["token_ids"] == expected(checkpoint, body["prompt"], body["max_tokens"])


def test_streamed_completion(client: Any, server: Server, checkpoint: Path) -> None:
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, **options(server)))
    assert len(chunks) > 4
    assert [token for chunk in chunks for token in tokens_of(chunk)] == expected(checkpoint, PROMPT)


def test_chat(client: Any, server: Server, checkpoint: Path) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    answer = client.chat.completions.create(messages=messages, **options(server))
    assert answer.choices[0].message.content
    assert tokens_of(answer) == expected(checkpoint, PROMPT, chat=True)


def test_streamed_chat(client: Any, server: Server, checkpoint: Path) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    stream = client.chat.completions.create(messages=messages, stream=True, **options(server))
    chunks = [chunk for chunk in stream if chunk.choices]
    assert [token for chunk in chunks for token in tokens_of(chunk)] == expected(checkpoint, PROMPT, chat=True)


def test_two_requests_in_flight_do_not_disturb_each_other(client: Any, server: Server, checkpoint: Path) -> None:
    texts = [PROMPT, "The little dog was very happy because"]

    def ask(text: str) -> list[int]:
        return tokens_of(client.completions.create(prompt=text, **options(server, 64)))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, texts)) == [expected(checkpoint, text, 64) for text in texts]


def test_bench_drives_a_running_server_with_vllms_own_client(server: Server, folder: Path) -> None:
    out = folder / "bench.json"
    small = ["--rounds", "1", "--rates", "inf", "--prompts", "2", "--new-tokens", "8"]
    command = [
        sys.executable,
        "-m",
        "lab.serving.load",
        "--url",
        server.url,
        "--model",
        str(folder / "served"),
        "--out",
        str(out),
        *small,
    ]
    process = subprocess.Popen(command, env=environment(folder, 1), start_new_session=True)
    try:
        assert process.wait(600) == 0
    finally:
        end_group(process)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tpot_ms"] > 0


def test_sigterm_lets_the_request_in_flight_finish(client: Any, server: Server, checkpoint: Path) -> None:
    """The last test of this server: it is gone afterwards."""
    stream = client.completions.create(prompt=PROMPT, stream=True, **options(server, 128))
    tokens = tokens_of(next(stream))
    server.processes[0].send_signal(signal.SIGTERM)
    tokens += [token for chunk in stream for token in tokens_of(chunk)]
    assert tokens == expected(checkpoint, PROMPT, 128)
    assert server.processes[0].wait(120) == 0


def test_without_the_plugin_the_server_refuses(folder: Path, checkpoint: Path) -> None:
    """A checkpoint that says what it is must not be served as if it were something else."""
    settings = environment(folder, 1) | {"VLLM_PLUGINS": ""}  # no plugin is loaded
    command = [*VLLM, "serve", str(checkpoint), "--port", str(free_port()), "--enforce-eager", "--max-model-len", "256"]
    process = subprocess.Popen(
        command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=300)
    finally:
        end_group(process)
    assert process.returncode != 0
    assert "ladder_llama" in said or "trust_remote_code" in said, said[-2000:]


def test_without_the_plugin_the_code_a_checkpoint_carries_is_not_enough(folder: Path, checkpoint: Path) -> None:
    """It makes the config known, and vLLM goes on to transformers' own model, which would know nothing of the wiring."""
    settings = environment(folder, 1) | {"VLLM_PLUGINS": ""}
    code = "import sys, vllm; vllm.LLM(sys.argv[1], trust_remote_code=True, enforce_eager=True, max_model_len=256, dtype='float32')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)], env=settings, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0
    assert "Unrecognized configuration class" in done.stderr, done.stderr[-2000:]
    assert "only through its plugin ladder_residual" in done.stderr


def test_registering_imports_no_model(folder: Path) -> None:
    """vLLM calls it in each of its processes: it tells names, and a model is imported when a checkpoint asks for it."""
    code = """
import sys
import vllm.entrypoints.openai.api_server
before = set(sys.modules)
from ladder_residual.vllm_plugin import register
register()
print("imported", *sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(folder, 1), capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("imported "))
    imported = set(line.split()[1:])
    assert "ladder_residual.vllm_plugin.routing" in imported
    ours = {
        f"ladder_residual.{name}"
        for name in ("vllm_plugin.models", "models.hf", "core.wiring", "generation", "engine", "distributed")
    }
    assert not imported & ours
    others = {name for name in imported if name.startswith(("torch.", "transformers.models.", "triton."))}
    assert not others
