"""Faults during ``ladder generate``: on one host (``--tp 2``), on two hosts (torchrun on each), over a link that fails."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lab.faults.inject import limit_memory, other_clock, other_uptime, other_version, starving, why_no_cgroup
from lab.faults.jobs import LADDER, GenerateJob
from lab.faults.outcome import Outcome, judge_end
from lab.faults.watched import WatchedRun
from lab.hosts.delayed_link import DelayedLink, why_not
from lab.hosts.namespaces import free_port, torchrun, torchrun_on

START_SECONDS = 240.0  # two interpreters and a model on a busy machine
LAUNCHER_SECONDS = 30.0  # what torch's launcher grants a rank that does not end by itself
SLACK_SECONDS = 20.0  # for ending processes on a busy machine
HOST = re.escape(socket.gethostname())


def undisturbed(job: GenerateJob) -> float:
    """Run once without a fault, keep its lines for comparison; seconds from the ranks' start to the end."""
    job.prepare()
    with WatchedRun([[*LADDER, *job.arguments()]], job.directory) as run:
        run.wait_for(lambda: len(run.ranks()) == 2, START_SECONDS, "two ranks were there")
        start = time.monotonic()
        if run.end(START_SECONDS) is None or run.exit_codes() != [0]:
            raise RuntimeError(f"the undisturbed run failed:\n{run.text()[-2000:]}")
        seconds = time.monotonic() - start
    job.reference = job.lines()
    return seconds


def random_kill(job: GenerateJob, duration: float, chance: random.Random) -> Outcome | None:
    """SIGKILL to one of two ranks at a random moment of a run that would last ``duration``; None if that was too late for it."""
    victim = chance.randrange(2)
    job.prepare()
    with WatchedRun([[*LADDER, *job.arguments()]], job.directory) as run:
        run.wait_for(lambda: len(run.ranks()) == 2, START_SECONDS, "two ranks were there")
        moment = run.wait_for_a_moment(chance, duration / 2, lambda: len(job.lines()), job.prompts)
        outcome = Outcome("SIGKILL", f"rank {victim}, {moment} prompts")
        held = run.traces()
        pid = run.ranks().get(victim)
        if pid is None:
            return None
        os.kill(pid, signal.SIGKILL)
        bound = job.timeout + LAUNCHER_SECONDS + SLACK_SECONDS
        outcome.ended_after_s = run.end(bound)
        error = rf"rank {victim} of 2 \(pid {pid}\) on {HOST} was killed by SIGKILL"
        return judge_end(outcome, run, held, bound=bound, codes={1}, error=error, wrong_output=job.wrong_output())


def stopped(job: GenerateJob) -> Outcome:
    """SIGSTOP: the rank is there and silent."""
    job.prepare()
    with WatchedRun([[*LADDER, *job.arguments()]], job.directory) as run:
        run.wait_for(job.begun, START_SECONDS, "the first line was written")
        held = run.traces()
        os.kill(run.ranks()[1], signal.SIGSTOP)
        outcome, bound = Outcome("SIGSTOP", "rank 1"), job.timeout + LAUNCHER_SECONDS + SLACK_SECONDS
        outcome.ended_after_s = run.end(bound)
        error = rf"rank 0 waited {job.timeout:.0f} s for rank 1 at 127\.0\.0\.1"
        return judge_end(outcome, run, held, bound=bound, codes={1}, error=error, wrong_output=job.wrong_output())


def out_of_memory(job: GenerateJob) -> Outcome:
    """No more address space for rank 1, in the middle of a batch that needs some."""
    hungry = replace(job, prompts=64, new_tokens=300)
    hungry.prepare()
    with WatchedRun([[*LADDER, *hungry.arguments(extra=["--batch-size", "64"])]], job.directory) as run:
        run.wait_for(lambda: hungry.output.exists(), START_SECONDS, "generation began")
        held = run.traces()
        limit_memory(run.ranks()[1])
        outcome, bound = Outcome("out of memory", "rank 1, address space"), 60 + job.timeout + LAUNCHER_SECONDS + SLACK_SECONDS
        outcome.ended_after_s = run.end(bound)
        error = rf"rank 1: rank 1 on {HOST} ran out of memory"
        return judge_end(outcome, run, held, bound=bound, codes={1}, error=error, wrong_output=None)


def killed_by_the_kernel(job: GenerateJob) -> Outcome:
    """Rank 1 in a full memory cgroup, in the middle of a batch that needs more: what a host's out-of-memory killer does."""
    hungry = replace(job, prompts=64, new_tokens=300)
    hungry.prepare()
    with WatchedRun([[*LADDER, *hungry.arguments(extra=["--batch-size", "64"])]], job.directory) as run:
        run.wait_for(lambda: hungry.output.exists(), START_SECONDS, "generation began")
        held = run.traces()
        outcome, bound = Outcome("out of memory", "rank 1, killed by the kernel"), 60 + job.timeout + LAUNCHER_SECONDS
        with starving(run.ranks()[1]):
            outcome.ended_after_s = run.end(bound)
        error = r"rank 1 of 2 .* was killed by SIGKILL \(if nobody did that, the host ran out of memory"
        return judge_end(outcome, run, held, bound=bound, codes={1}, error=error, wrong_output=None)


def two_nodes(
    job: GenerateJob,
    fault: str,
    *,
    extra: Sequence[Sequence[str]] = ((), ()),
    prefix: Sequence[Sequence[str]] = ((), ()),
    environment: Mapping[str, str] | None = None,
    source_of_rank_1: Path | None = None,
    error: str | None,
) -> Outcome:
    """torchrun twice, as on two hosts, with something different about the second; ``error`` None: it must not matter."""
    job.prepare()
    port = free_port()
    jobs = [job, replace(job, source=str(source_of_rank_1)) if source_of_rank_1 else job]
    commands = []
    for node in range(2):
        program = [*LADDER[1:], *jobs[node].arguments(None, extra[node])]
        started = torchrun(node, 2, "127.0.0.1", port, program, ["--log-dir", str(job.directory / "logs")])
        commands.append([*prefix[node], *started])
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(environment or {})}
    outcome, bound = Outcome(fault, "rank 1"), START_SECONDS + job.timeout
    with WatchedRun(commands, job.directory, loopback) as run:
        run.wait_for(lambda: len(run.ranks()) == 2, START_SECONDS, "two ranks were there")
        held = run.traces()
        outcome.ended_after_s = run.end(bound)
        if error is None:
            outcome.bound_s, outcome.exit_codes = bound, run.exit_codes()
            if run.exit_codes() != [0, 0] or job.lines() != job.reference:
                outcome.wrong.append(f"the run was disturbed: {run.text()[-600:]}")
            outcome.wrong += [f"left behind: {thing}" for thing in run.left_over(held)]
            return outcome
        judged = judge_end(outcome, run, held, bound=bound, codes={1}, error=error, wrong_output=None)
        judged.wrong = [thing for thing in judged.wrong if thing != "a traceback was printed"]  # torchrun prints one of its own
        if job.lines():
            judged.wrong.append("text was written before the difference was found")
        return judged


def other_versions(job: GenerateJob) -> Outcome:
    environment = other_version(job.directory, rank=1)
    return two_nodes(job, "another version", environment=environment, error=rf"the software of rank 1 on {HOST} \(.*\) differs")


def other_checkpoint(job: GenerateJob) -> Outcome:
    """The same config and names, one weight with another bit."""
    changed = job.directory / "other-checkpoint"
    shutil.rmtree(changed, ignore_errors=True)
    shutil.copytree(job.source, changed)
    weights = changed / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1000] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    return two_nodes(
        job, "another checkpoint", source_of_rank_1=changed, error=rf"the checkpoint of rank 1 on {HOST} differs from rank 0's"
    )


def other_wiring(job: GenerateJob) -> Outcome:
    return two_nodes(
        job, "another wiring", extra=((), ("--wiring", "ladder")), error=rf"the config or wiring of rank 1 on {HOST} differs"
    )


def clocks_apart(job: GenerateJob) -> Outcome:
    """A day between the wall clocks, and where the kernel can do it between the monotonic ones too: must not matter."""
    uptime = other_uptime(86_400)
    environment = other_clock(job.directory, rank=1, seconds=86_400)
    outcome = two_nodes(job, "another clock", prefix=((), uptime), environment=environment, error=None)
    outcome.detail = "rank 1, wall clock" + (" and monotonic clock" if uptime else "") + " a day ahead"
    return outcome


def link_down(job: GenerateJob, seconds: float | None) -> Outcome:
    """Two hosts, and nothing arrives any more for ``seconds``; None: for good."""
    job.prepare()
    short = "for good" if seconds is None else f"for {seconds:g} s"
    outcome = Outcome("link down", short)
    with DelayedLink(0.0005) as link:
        port = free_port()
        logs = ["--log-dir", str(job.directory / "logs")]
        program = ["-m", "ladder_residual", *job.arguments(None)]
        commands = [torchrun_on(link, host, port, program, logs) for host in range(2)]
        environment = {"GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1"}
        with WatchedRun(commands, job.directory, environment) as run:
            run.wait_for(job.begun, START_SECONDS, "the first line was written")
            held = run.traces()
            link.cut()
            if seconds is not None:
                time.sleep(seconds)
                link.mend()
                bound = START_SECONDS
                outcome.ended_after_s, outcome.bound_s = run.end(bound), bound
                outcome.exit_codes = run.exit_codes()
                if outcome.exit_codes != [0, 0] or job.lines() != job.reference:
                    outcome.wrong.append(f"did not survive: {run.text()[-600:]}")
                return outcome
            bound = 2 * job.timeout + LAUNCHER_SECONDS + SLACK_SECONDS
            outcome.ended_after_s = run.end(bound)
            error = rf"rank \d waited {job.timeout:.0f} s for rank \d at 10\.211\.\d+\.\d: it is stopped, or the link is down"
            judged = judge_end(outcome, run, held, bound=bound, codes={1}, error=error, wrong_output=job.wrong_output())
            judged.wrong = [thing for thing in judged.wrong if thing != "a traceback was printed"]
            return judged


def named_faults(job: GenerateJob) -> list[tuple[str, str | None, Callable[[], Outcome]]]:
    """(name, why it cannot be tried here or None, how)."""
    patient = replace(job, timeout=max(job.timeout, 20.0))
    return [
        ("stop", None, lambda: stopped(job)),
        ("memory", None, lambda: out_of_memory(job)),
        ("oom-killer", why_no_cgroup(), lambda: killed_by_the_kernel(job)),
        ("link-5s", why_not(), lambda: link_down(patient, 5.0)),
        ("link", why_not(), lambda: link_down(job, None)),
        ("clock", None, lambda: clocks_apart(job)),
        ("version", None, lambda: other_versions(job)),
        ("checkpoint", None, lambda: other_checkpoint(job)),
        ("wiring", None, lambda: other_wiring(job)),
    ]
