"""Two machines, as docs/serving.md starts them: two network namespaces of this one, and a slow link between them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import guide
import pytest
import tiny
from engines import environment

from lab.hosts.delayed_link import DelayedLink, why_not
from lab.serving.servers import Server, free_port, stop, wait_until_up

NEW_TOKENS = 24


@pytest.mark.skipif(why_not() is not None, reason=f"no network namespaces here: {why_not()}")
def test_the_pages_two_machines_answer_as_one(folder: Path) -> None:
    checkpoint = tiny.with_tokenizer(tiny.rewired(folder, "ladder:1-3"))
    (prompt,) = tiny.prompts(17)
    port, processes = free_port(), []
    tiny_and_quick = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8", "--dtype", "float32"]
    with DelayedLink(seconds=0.0005) as link:
        try:
            for node, command in enumerate(guide.commands("Several machines")):
                words = guide.words(command, DIR=str(checkpoint), FIRST=link.addresses[0])
                ours = environment(folder, 2)
                cores = ours["VLLM_CPU_OMP_THREADS_BIND"].split("|")
                settings = {"VLLM_HOST_IP": link.addresses[node], "GLOO_SOCKET_IFNAME": "link0"}
                settings |= {"VLLM_CPU_OMP_THREADS_BIND": cores[node]}
                with (folder / f"node-{node}.log").open("wb") as sink:
                    processes.append(
                        subprocess.Popen(
                            [*link.enter(node), *words, "--port", str(port), *tiny_and_quick],
                            env=guide.with_programs(ours | settings),
                            stdout=sink,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            url = f"http://127.0.0.1:{port}"
            server = Server("two machines", url, str(checkpoint), link.enter(0), processes=processes)
            wait_until_up(server, folder / "node-0.log")
            body = {"model": server.model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
            ask = ["curl", "--silent", "--fail", f"{url}/v1/completions", "-H", "Content-Type: application/json"]
            done = subprocess.run(
                [*link.enter(0), *ask, "-d", json.dumps(body | {"return_token_ids": True})],
                capture_output=True,
                text=True,
                check=True,
            )
            assert json.loads(done.stdout)["choices"][0]["token_ids"] == tiny.greedy(checkpoint, [prompt], NEW_TOKENS)[0]
        finally:
            stop(processes)
