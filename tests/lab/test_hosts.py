"""Network namespaces with a slow link between them, torchrun on every host."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from lab.hosts.__main__ import app
from lab.hosts.delayed_link import DelayedLink, why_not
from lab.hosts.links import FOUR_LINKS, NetworkShape, parse_links
from lab.hosts.namespaces import measure_link

COMMAND = [sys.executable, "-m", "lab.hosts", "--repeats", "5", "--prompt", "4"]
needs_root = pytest.mark.skipif(bool(why_not()), reason=f"no link can be made here: {why_not()}")


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith("ladder-")}


def test_links_by_name():
    assert [link.name for link in parse_links(FOUR_LINKS)] == [
        "0.1 ms, 10 Gbit/s",
        "0.25 ms, 1 Gbit/s",
        "1 ms, 1 Gbit/s",
        "2 ms, 1 Gbit/s",
    ]
    assert NetworkShape.parse("250us") == NetworkShape(0.00025, None)
    assert NetworkShape.parse("0/100mbit") == NetworkShape(0.0, 1e8)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("fast", "cannot read the delay"),
        ("1ms/fast", "cannot read the rate"),
        ("5", "cannot read the delay"),
        ("1ms/", "ends after"),
    ]
    + [("2s", "more than a second"), ("1ms,1ms", "twice"), ("", "cannot read the delay"), ("-1ms", "cannot read the delay")],
)
def test_bad_links_are_refused(text, named):
    with pytest.raises(ValueError, match=named):
        parse_links(text)


@needs_root
@pytest.mark.parametrize(("seconds", "rate", "hosts", "wire"), [(0.002, 2e8, 3, "forwarder"), (0.0, 2e8, 2, "veth")])
def test_a_link_has_the_delay_and_rate_it_was_asked_for(seconds, rate, hosts, wire):
    before = namespaces()
    with DelayedLink(seconds, rate, hosts) as link:
        if wire == "forwarder" and link.wire == "netem":
            wire = "netem"
        assert link.wire == wire
        found = measure_link(link)
        assert found["rtt_ms"] >= 2e3 * seconds
        assert 20 < found["bandwidth_mbit_s"] < 230  # a busy machine is slower, none is faster
        assert (link.forwarder_seconds() > 0) == (wire == "forwarder")
    assert namespaces() <= before


@needs_root
def test_netem_is_used_where_the_kernel_has_it(tmp_path, monkeypatch):
    """This kernel may lack it: a `tc` that claims to have it shows that it would be asked, and a veth pair carries the packets."""
    log = tmp_path / "calls"
    (tmp_path / "tc").write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with DelayedLink(0.001, 1e9) as link:
        assert link.wire == "netem"
        assert measure_link(link)["rtt_ms"] < 2  # nothing delays: the claim was false
    asked = [line for line in log.read_text().splitlines() if "link0" in line]
    assert asked == ["qdisc replace dev link0 root netem delay 1000us limit 100000 rate 1000000000bit"] * 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may make links")
def test_without_root_it_says_so(demo_dir):
    done = subprocess.run([*COMMAND, "--model", str(demo_dir)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "network namespaces need root" in done.stderr


@pytest.mark.slow
@needs_root
def test_hosts_measure_every_wiring_over_every_link_and_leave_nothing(demo_dir, tmp_path):
    before = namespaces()
    options = [
        "--model",
        str(demo_dir),
        "--links",
        "1ms/1gbit,0/100mbit",
        "--out",
        str(tmp_path / "result.json"),
        "--comm-dtype",
        "bf16",
    ]
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "result.json").read_text()) == result
    slow, fast = result["links"]
    assert slow["rtt_ms"] >= 2.0  # what was asked for, and what the wire adds
    assert fast["rtt_ms"] < 2.0
    wirings = ("standard", "ladder:last-half", "ladder", "parallel", "desync-2x", "no-comm")
    assert {(row["link"], row["phase"], row["wiring"]) for row in result["rows"]} == {
        (link["link"], phase, wiring) for link in (slow, fast) for phase in ("decode", "prefill") for wiring in wirings
    }
    # An all-reduce crosses a link of 1 ms: ten of them cannot take less than 10 ms.
    assert all(phase["communication_ms"] > 10 for phase in slow["phases"])
    first = slow["link_probe"]["rows"][0]
    assert first["gloo"] > first["sockets"]  # two trips against one
    assert result["comm_dtype"] == "bfloat16"
    assert namespaces() <= before
    assert done.stdout.count("| 1 ms, 1 Gbit/s |") >= 3


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_removes_the_hosts(demo_dir, how):
    before = namespaces()
    process = subprocess.Popen([*COMMAND, "--model", str(demo_dir)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not namespaces() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)
    os.kill(process.pid, how)
    process.wait(60)
    assert namespaces() <= before


def test_bad_options_are_refused(demo_dir):
    for options, named in (["--rate", "fast"], "cannot read the rate"), (["--delay", "5"], "cannot read the delay"):
        done = CliRunner().invoke(app, ["--model", str(demo_dir), *options])
        assert named in str(done.exception)
