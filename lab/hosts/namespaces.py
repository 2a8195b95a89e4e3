"""Several hosts on one machine: network namespaces with addresses of their own and a link of chosen delay and rate between them.

Everything is real but the link: torchrun on each host, sockets between them, the same commands as on several machines. Needs root.
What was made is removed at the end, also after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.hosts.delayed_link import DelayedLink
from lab.hosts.links import NetworkShape


def bench_hosts(
    links: Sequence[NetworkShape],
    program: Sequence[str],
    *,
    hosts: int = 2,
    timeout: float = 1800.0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """``python PROGRAM`` (a measurement on ranks, see ``ranks.py``) across ``hosts`` hosts, over each link in turn."""
    parts: list[dict[str, Any]] = []
    for each in links:
        with DelayedLink(each.seconds, each.rate, hosts) as link:
            # Measured before our own ranks start: what others do on this machine meanwhile makes every figure worse.
            facts = {"link": each.name, "wire": link.wire, "rate_bit_s": each.rate, "load_before": os.getloadavg()[0]}
            facts |= measure_link(link)
            say(
                f"{each.name}: round trip {facts['rtt_ms']:.2f} ms (the {link.wire} adds {facts['wire_adds_ms']:.3f} ms each way), "
                f"{facts['bandwidth_mbit_s']:.0f} Mbit/s"
            )
            before, start = link.forwarder_seconds(), time.monotonic()
            found = run_on_hosts(link, program, timeout)
            facts["wire_cpu_percent"] = 100 * (link.forwarder_seconds() - before) / (time.monotonic() - start)
        phases = found.pop("phases")
        parts.append({**facts, "link_probe": found.pop("link_probe"), "phases": phases, "common": found})
    rows = [
        {"link": part["link"], "phase": phase["phase"], **row}
        for part in parts
        for phase in part["phases"]
        for row in phase.pop("rows")
    ]
    common = parts[0]["common"]
    for part in parts:
        del part["common"]
    return {"benchmark": "hosts", "hosts": hosts, **common, "links": parts, "rows": rows}


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


def measure_link(link: DelayedLink) -> dict[str, Any]:
    """Round trip and bandwidth of the link as made, so that its own cost beyond the asked delay is seen."""
    host, port = link.addresses[0], "29400"
    serve = subprocess.Popen([*link.enter(0), sys.executable, "-c", _PROBE, "serve", host, port])
    try:
        probe = subprocess.run(
            [*link.enter(1), sys.executable, "-c", _PROBE, "probe", host, port], capture_output=True, text=True, timeout=300
        )
    finally:
        serve.kill()
        serve.wait()
    if probe.returncode:
        raise RuntimeError(f"the link does not carry data: {probe.stderr.strip()[-300:]}")
    trip, bandwidth = json.loads(probe.stdout)
    return {
        "delay_ms": 1e3 * link.seconds,
        "rtt_ms": 1e3 * trip,
        "wire_adds_ms": 1e3 * (trip - 2 * link.seconds) / 2,
        "bandwidth_mbit_s": 8e-6 * bandwidth,
    }


def torchrun(node: int, nodes: int, address: str, port: int, program: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The command that starts the one rank of node ``node``."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", "1"]
    launcher += ["--node-rank", str(node), "--master-addr", address, "--master-port", str(port), *options]
    return [*launcher, *program]


def torchrun_on(link: DelayedLink, host: int, port: int, program: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The same inside the network namespace of host ``host``."""
    return [*link.enter(host), *torchrun(host, link.hosts, link.addresses[0], port, program, options)]


def rank_environment() -> dict[str, str]:
    return os.environ | {"GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def run_on_hosts(link: DelayedLink, program: Sequence[str], timeout: float) -> dict[str, Any]:
    """torchrun on each host, one rank a host; rank 0's last line is the result."""
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="ladder-hosts-") as scratch:
        outputs = [Path(scratch) / f"host{host}.txt" for host in range(link.hosts)]
        logs = ["--log-dir", str(Path(scratch) / "logs")]
        try:
            for host in range(link.hosts):
                with outputs[host].open("w") as sink:
                    processes.append(
                        subprocess.Popen(
                            torchrun_on(link, host, port, program, logs),
                            stdout=sink,
                            stderr=subprocess.STDOUT,
                            env=rank_environment(),
                            text=True,
                            start_new_session=True,
                        )
                    )
            deadline = time.monotonic() + timeout
            for process in processes:
                process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the {link.hosts} hosts did not finish within {timeout:.0f} s") from None
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        for host, process in enumerate(processes):
            if process.returncode:
                raise RuntimeError(f"host {host} failed:\n{outputs[host].read_text()[-2000:]}")
        lines = [line for line in outputs[0].read_text().splitlines() if line.startswith("{")]
        return json.loads(lines[-1])


def free_port() -> int:
    # Free in this namespace says little about the others', which are new and empty: any port will do.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
