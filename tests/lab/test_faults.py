"""Ranks that die, starve, differ or cannot write: real processes, and what the user sees. `python -m lab.faults` tries all of it."""

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lab.faults import generate_faults, train_faults
from lab.faults.__main__ import faults
from lab.faults.campaign import before, run_campaign
from lab.faults.gpu import used_mib, with_free_gpu
from lab.faults.inject import why_no_cgroup
from lab.faults.jobs import LADDER, GenerateJob, TrainJob
from lab.faults.outcome import Outcome, judge_end
from lab.faults.watched import Traces, WatchedRun
from lab.hosts.delayed_link import DelayedLink, why_not
from ladder_residual.common.line_writer import LineWriter
from ladder_residual.distributed.launch import LOST_PEER, OUT_OF_MEMORY, USER_ERROR, user_message
from ladder_residual.distributed.sockets import PeerLost
from tests.forked import run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched through /proc")
root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@pytest.fixture
def job(demo_dir, tmp_path):
    return GenerateJob(tmp_path / "job", str(demo_dir), prompts=30, new_tokens=40)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KB."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_no_kill_begins_after_its_time():
    begun = []
    attempts = (begun.append(number) or Outcome("SIGKILL", str(number)) for number in range(3))
    assert list(before(0.0, attempts)) == begun == []  # long ago
    assert [outcome.detail for outcome in before(None, attempts)] == ["0", "1", "2"]


@pytest.mark.parametrize(("used", "free"), [("75\n", True), ("75\n512\n", False)])
def test_a_gpu_that_is_not_free_after_a_run_is_told(tmp_path, monkeypatch, used, free):
    """With the driver's program in the driver's place: two GPUs are two lines."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{used}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert used_mib() == sum(map(int, used.split()))
    outcome = with_free_gpu(Outcome("SIGKILL"), idle_mib=75, within=0.3)
    assert outcome.as_documented == free
    assert with_free_gpu(None, idle_mib=75) is None


def test_messages_of_errors():
    assert user_message(ValueError("x")) == ("x", USER_ERROR)
    assert user_message(OSError(28, "No space left on device")) == ("[Errno 28] No space left on device", USER_ERROR)
    assert user_message(PeerLost("rank 1 is gone")) == ("rank 1 is gone", LOST_PEER)
    starved = [MemoryError(), RuntimeError("can't allocate memory: 5 bytes"), OSError(12, "Cannot allocate memory")]
    starved.append(SystemError("error return without exception set"))
    for error in starved:
        text, code = user_message(error)
        assert code == OUT_OF_MEMORY
        assert "ran out of memory" in text
    assert user_message(RuntimeError("a bug")) is None  # keeps its traceback


def test_a_killed_rank_and_only_loopback(job):
    """One run: its ports are on loopback, the kill ends it as documented, nothing is left."""
    job.prepare()
    with WatchedRun([[*LADDER, *job.arguments()]], job.directory) as run:
        run.wait_for(job.begun, 240, "the first line was written")
        held = run.traces()
        assert held.ports
        assert _listening_addresses(run) == {"0100007F"}, "a port is open to other hosts"
        pid = run.ranks()[1]
        os.kill(pid, 9)
        outcome = Outcome("SIGKILL")
        outcome.ended_after_s = run.end(60)
        error = rf"rank 1 of 2 \(pid {pid}\) on {generate_faults.HOST} was killed by SIGKILL"
        judged = judge_end(outcome, run, held, bound=60, codes={1}, error=error, wrong_output=job.wrong_output())
        assert judged.as_documented, judged.wrong
        assert "Once upon" not in run.text()  # prompts are no part of a log


def _listening_addresses(run):
    found = set()
    for pid in run.pids():
        inodes = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                inodes.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.slow
def test_a_rank_out_of_memory_is_named(job):
    outcome = generate_faults.out_of_memory(job)
    assert outcome.as_documented, outcome.wrong


def test_a_watched_run_notices_what_is_left(tmp_path):
    """The judge itself: an orphan, a port, a file and a wrong exit are all seen."""
    script = "import socket,time,tempfile,os\ns=socket.create_server(('127.0.0.1',0))\nopen(tempfile.mkdtemp()+'/x','w')\n"
    script += "print('up',flush=True)\ntime.sleep(1)\nif os.fork(): os._exit(5)\ntime.sleep(60)"
    with WatchedRun([[sys.executable, "-c", script]], tmp_path) as run:
        run.wait_for(lambda: "up" in run.text(), 60, "it was up")
        held = run.traces()
        assert held.ports
        outcome = Outcome("orphan")
        outcome.ended_after_s = run.end(30)
        judge_end(outcome, run, held, bound=30, codes={1}, error="rank 1", wrong_output=None, grace=0.2)
        wrong = "\n".join(run.left_over(held, grace=0.2) + outcome.wrong)
        for sign in ("process ", "port ", "file tmp-", "exit codes [5]", "no error that matches"):
            assert sign in wrong
    assert not run.pids()
    assert run.left_over(Traces(), grace=0) != []  # its files


@pytest.mark.skipif(why_not() is not None, reason="no link can be made here")
def test_ports_are_looked_for_where_they_were(tmp_path):
    """A port of another host is no port of this one: each is looked for in its own network namespace."""
    script = "import socket,time\ns=socket.create_server(('127.0.0.1',0))\nprint('up',flush=True)\ntime.sleep(60)"
    with DelayedLink(0.0) as link, WatchedRun([[*link.enter(1), sys.executable, "-c", script]], tmp_path) as run:
        run.wait_for(lambda: "up" in run.text(), 60, "it was up")
        held = run.traces()
        ((namespace, port),) = held.ports
        assert namespace != os.readlink("/proc/self/ns/net")
        assert f"port {port}" in run.left_over(held, grace=0)
        for pid in run.pids():
            os.kill(pid, 9)
        assert run.left_over(held) == []


def test_what_is_left_of_a_save_is_counted_and_must_go(tmp_path):
    job, outcome = TrainJob(tmp_path), Outcome("SIGKILL")
    (job.run / "checkpoints" / "step-00000005.tmp").mkdir(parents=True)
    train_faults.look_at_checkpoints(job, outcome)
    assert outcome.unfinished_saves == 1
    assert outcome.as_documented  # nobody takes it for a checkpoint
    train_faults.has_finished(job, outcome)
    assert outcome.wrong == ["still there after the restart: step-00000005.tmp"]


@root
def test_lines_are_whole_on_a_full_disk(small_disk):
    path = small_disk / "out.jsonl"
    line = "x" * 9999

    def fill(sink):
        for _ in range(100):
            sink.write(line)

    with LineWriter(path) as sink, pytest.raises(ValueError, match="No space left on device; the lines before are there"):
        fill(sink)
    lines = path.read_text().splitlines(keepends=True)
    assert 4 <= len(lines) <= 6
    assert all(each == line + "\n" for each in lines)


@root
def test_commands_on_a_full_or_read_only_disk(demo_dir, small_disk, tmp_path):
    """convert: one line, exit code 2, and nothing half-made. The source is on another file system, so that it must copy."""

    def convert():
        words = ["convert", str(demo_dir), str(small_disk / "out"), "--wiring", "ladder", "--copy"]
        return run_program(*words)

    done = convert()
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert list(small_disk.iterdir()) == []
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = convert()
    assert done.returncode == 2
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(ValueError, match="cannot write .*Read-only file system"):
        LineWriter(small_disk / "out.jsonl")


def test_campaigns_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="choose from generate, generate-gpu, train"):
        faults("sleep")


GENERATE = ["stop", "oom-killer", "link-5s", "link", "clock", "version", "checkpoint", "wiring"]


@pytest.mark.slow
def test_generation_under_every_fault(tmp_path):
    result = run_campaign("generate", tmp_path, rounds=1, named=",".join(GENERATE), seed=1, timeout=5.0)
    assert result["kills_as_documented"] == 1, result["rows"]
    assert result["named_as_documented"] == result["named"], [row for row in result["rows"] if not row["as_documented"]]
    assert bool(why_not()) == ("link" in result["not_tried"])
    assert bool(why_no_cgroup()) == ("oom-killer" in result["not_tried"])


@pytest.mark.slow
def test_training_is_killed_and_goes_on(tmp_path):
    """By hand and by torchrun's restarts, to the losses of the undisturbed run."""
    job, chance = TrainJob(tmp_path, steps=30, timeout=5.0), random.Random(3)
    duration = train_faults.undisturbed(job)
    for elastic in (True, False):
        attempts = (train_faults.random_kill(job, duration, chance, elastic) for _ in range(3))
        outcome = next(filter(None, attempts))  # a moment may come when the run has ended
        assert outcome.as_documented, outcome.wrong
    faults = [train_faults.stopped, train_faults.killed_while_saving]
    for fault in [*faults, train_faults.full_disk] if os.geteuid() == 0 else faults:
        outcome = fault(job)
        assert outcome.as_documented, outcome.wrong


@pytest.mark.slow
def test_training_with_several_copies_of_the_model_names_the_lost_rank(tmp_path):
    """Gloo and FSDP notice the loss there. That training goes on to the same losses is tried by `python -m lab.faults --what train`."""
    job = train_faults.copies(TrainJob(tmp_path, timeout=5.0))
    outcome = train_faults.killed(job, again=False)
    assert outcome.as_documented, outcome.wrong
    # Continued, so that the launcher need not wait its 30 s for a process that cannot end; by then it has long been given up.
    outcome = train_faults.stopped(job, continued_after=2 * job.timeout + 6, again=False)
    assert outcome.as_documented, outcome.wrong
    assert f"no answer from rank 1 on {socket.gethostname()}" in outcome.message
