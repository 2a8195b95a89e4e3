"""The link laboratory: two network namespaces, a slow wire, torchrun on both sides."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ladder_residual.bench.delayed_link import why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=f"no link can be made here: {why_not()}")]

COMMAND = [sys.executable, "-m", "ladder_residual", "bench", "hosts", "--repeats", "5", "--prompt", "4"]


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith("ladder-")}


def test_two_hosts_measure_every_wiring_and_leave_nothing(demo_dir):
    before = namespaces()
    options = [
        "--model",
        str(demo_dir),
        "--delay",
        "1ms",
        "--rate",
        "1gbit",
        "--phases",
        "decode,prefill",
        "--wirings",
        "ladder",
    ]
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["rtt_ms"] >= 2.0  # what was asked for, and what the wire adds
    assert 100 < result["bandwidth_mbit_s"] < 1100
    assert {(row["phase"], row["wiring"]) for row in result["rows"]} == {
        (phase, wiring) for phase in ("decode", "prefill") for wiring in ("standard", "ladder", "no-comm")
    }
    # A sum crosses a 1 ms wire: ten of them cannot take less than 10 ms.
    assert result["bounds"]["decode"]["communication_ms"] > 10
    assert namespaces() <= before


def test_interrupting_removes_the_hosts(demo_dir):
    before = namespaces()
    process = subprocess.Popen([*COMMAND, "--model", str(demo_dir)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not namespaces() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)
    os.kill(process.pid, signal.SIGINT)
    process.wait(60)
    assert namespaces() <= before


def test_bad_links_are_refused(demo_dir):
    for options, named in (["--rate", "fast"], "cannot read the rate"), (["--delay", "5"], "no unit"):
        done = subprocess.run([*COMMAND, "--model", str(demo_dir), *options], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert named in done.stderr
