"""Two hosts on one machine: network namespaces with addresses of their own and a link of chosen delay and rate between them.

Everything is real but the wire: torchrun on each side, sockets between them, the same commands as on two machines. Needs root.
What was made is removed at the end, also after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .delayed_link import DelayedLink

_RATE = re.compile(r"[0-9]+(\.[0-9]+)?(k|m|g)bit")


def bench_hosts(
    *,
    delay: float,
    rate: str | None,
    model: str,
    layers: int | None,
    wirings: list[str],
    batch: int,
    prompt: int,
    repeats: int,
    phases: list[str],
    timeout: float = 600.0,
) -> dict[str, Any]:
    """``ladder bench overlap`` across two hosts ``delay`` seconds (one way) and ``rate`` (as `tc` writes it: 1gbit) apart."""
    if rate is not None and not _RATE.fullmatch(rate):
        raise ValueError(f"cannot read the rate {rate!r}; write it as tc does, e.g. 1gbit or 100mbit")
    with DelayedLink(delay) as link:
        if rate:
            _shape(link, rate)
        measured = _measure_link(link)
        results = []
        for phase in phases:
            arguments = [
                "bench",
                "overlap",
                "--model",
                model,
                "--wirings",
                ",".join(wirings),
                "--latency",
                "0",
                "--phase",
                phase,
            ]
            arguments += ["--batch", str(batch), "--prompt", str(prompt), "--repeats", str(repeats), "--device", "cpu"]
            if layers is not None:
                arguments += ["--layers", str(layers)]
            results.append(_run_on_both(link, arguments, timeout))
    name = f"two hosts, {1e3 * delay:g} ms one way" + (f", {rate}" if rate else "")
    rows = [{"phase": result["phase"], **row} for result in results for row in result["rows"]]
    bounds = {
        result["phase"]: {key: result[key] for key in ("compute_ms", "communication_ms", "bound_ms", "message_bytes")}
        for result in results
    }
    return {**results[0], "benchmark": "hosts", "link": name, **measured, "bounds": bounds, "rows": rows}


def _shape(link: DelayedLink, rate: str) -> None:
    """Limit what each side may send; a token bucket of a few packets, as a network card has."""
    for side in range(2):
        command = [*link.enter(side), "tc", "qdisc", "replace", "dev", "link0", "root", "tbf", "rate", rate]
        done = subprocess.run([*command, "burst", "256kb", "latency", "400ms"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"the rate {rate} cannot be set: {done.stderr.strip() or 'tc failed'}")


_PROBE = """
import socket, sys, time, statistics, json
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
def exactly(connection, count):
    while count:
        count -= len(connection.recv(min(count, 1 << 20)) or sys.exit("peer closed"))
if role == "serve":
    with socket.create_server((host, port)) as server:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(60):
            exactly(connection, 1); connection.sendall(b"x")
        exactly(connection, 1 << 24); connection.sendall(b"x")
else:
    for _ in range(100):
        try:
            connection = socket.create_connection((host, port), 10); break
        except OSError:
            time.sleep(0.05)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(60):
        start = time.perf_counter(); connection.sendall(b"x"); exactly(connection, 1); trips.append(time.perf_counter() - start)
    start = time.perf_counter(); connection.sendall(bytes(1 << 24)); exactly(connection, 1)
    print(json.dumps([statistics.median(trips[10:]), (1 << 24) / (time.perf_counter() - start)]))
"""


def _measure_link(link: DelayedLink) -> dict[str, Any]:
    """Round trip and bandwidth of the link as made, so that its own cost beyond the asked delay is seen."""
    host, port = link.addresses[0], "29400"
    serve = subprocess.Popen([*link.enter(0), sys.executable, "-c", _PROBE, "serve", host, port])
    try:
        probe = subprocess.run(
            [*link.enter(1), sys.executable, "-c", _PROBE, "probe", host, port], capture_output=True, text=True, timeout=120
        )
    finally:
        serve.kill()
        serve.wait()
    if probe.returncode:
        raise RuntimeError(f"the link does not carry data: {probe.stderr.strip()[-300:]}")
    trip, bandwidth = json.loads(probe.stdout)
    return {
        "rtt_ms": 1e3 * trip,
        "forwarder_ms": 1e3 * (trip - 2 * link.seconds) / 2,  # what the user-space wire adds to each direction
        "bandwidth_mbit_s": 8e-6 * bandwidth,
    }


def _run_on_both(link: DelayedLink, arguments: list[str], timeout: float) -> dict[str, Any]:
    """torchrun on each side, one rank a host; rank 0's last line is the result."""
    port = _free_port()
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="ladder-hosts-") as scratch:
        outputs = [Path(scratch) / f"host{side}.txt" for side in range(2)]
        try:
            for side in range(2):
                launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
                launcher += ["--node-rank", str(side), "--master-addr", link.addresses[0], "--master-port", str(port)]
                with outputs[side].open("w") as sink:
                    processes.append(
                        subprocess.Popen(
                            [*link.enter(side), *launcher, "-m", "ladder_residual", *arguments],
                            stdout=sink,
                            stderr=subprocess.STDOUT,
                            env=environment,
                            text=True,
                            start_new_session=True,
                        )
                    )
            deadline = time.monotonic() + timeout
            for process in processes:
                process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the two hosts did not finish within {timeout:.0f} s") from None
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        for side, process in enumerate(processes):
            if process.returncode:
                raise RuntimeError(f"host {side} failed:\n{outputs[side].read_text()[-2000:]}")
        lines = [line for line in outputs[0].read_text().splitlines() if line.startswith("{")]
        return json.loads(lines[-1])


def _free_port() -> int:
    # Free in this namespace says little about the others', which are new and empty: any port will do.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
