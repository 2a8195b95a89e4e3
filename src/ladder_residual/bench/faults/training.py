"""Faults during ``ladder train``: the run ends as said and goes on from its last checkpoint, by hand or through torchrun's restarts."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..delayed_link import DelayedLink, why_not
from ..hosts.laboratory import free_port, torchrun_on
from .generating import LAUNCHER_SECONDS, SLACK_SECONDS, START_SECONDS
from .injury import limit_memory, other_clock, other_uptime, other_version, starving, why_no_cgroup
from .jobs import LADDER, TrainJob
from .outcome import Outcome, judge_end
from .watched import WatchedRun

HOST = re.escape(socket.gethostname())
RESTARTS = 3


def undisturbed(job: TrainJob) -> float:
    """Run once without a fault, keep its losses; seconds from the ranks' start to the end."""
    job.prepare()
    with WatchedRun([[*LADDER, *job.arguments()]], job.directory) as run:
        run.wait_for(lambda: len(run.ranks()) == 2, START_SECONDS, "two ranks were there")
        start = time.monotonic()
        if run.end(START_SECONDS) is None or run.exit_codes() != [0]:
            raise RuntimeError(f"the undisturbed run failed:\n{run.text()[-2000:]}")
        seconds = time.monotonic() - start
    job.reference = job.losses()
    return seconds


def random_kill(job: TrainJob, duration: float, chance: random.Random, elastic: bool) -> Outcome:
    """SIGKILL to one of two ranks at a random moment. ``elastic``: torchrun starts all again by itself; else a user does."""
    victim, moment = chance.randrange(2), chance.uniform(0, 0.9 * duration)
    job.prepare()
    command = elastic_command(job) if elastic else [*LADDER, *job.arguments()]
    with WatchedRun([command], job.directory, {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}) as run:
        run.wait_for(lambda: len(run.ranks()) == 2, START_SECONDS, "two ranks were there")
        time.sleep(moment)
        held, ranks, steps = run.traces(), run.ranks(), len(job.losses())
        how = "restarted by torchrun" if elastic else "started again by hand"
        outcome = Outcome("SIGKILL", f"rank {victim}, {moment:.1f} s after its start, after {steps} steps, {how}")
        if victim not in ranks:
            outcome.wrong.append("nothing was left to kill")
            return outcome
        os.kill(ranks[victim], signal.SIGKILL)
        if elastic:
            outcome.bound_s = job.timeout + LAUNCHER_SECONDS + START_SECONDS
            outcome.ended_after_s = run.end(outcome.bound_s)
            outcome.exit_codes = run.exit_codes()
            if outcome.exit_codes != [0]:
                outcome.wrong.append(f"exit codes {outcome.exit_codes}: {run.text()[-600:]!r}")
            outcome.wrong += [f"left behind: {thing}" for thing in run.left_over(held)]
        else:
            bound = job.timeout + LAUNCHER_SECONDS + SLACK_SECONDS
            outcome.ended_after_s = run.end(bound)
            says = rf"rank {victim} of 2 \(pid {ranks[victim]}\) on {HOST} was killed by SIGKILL"
            judge_end(outcome, run, held, bound=bound, codes={1}, says=says, wrong_output=job.wrong_losses(whole=False))
    outcome.wrong += [f"half-written: {thing}" for thing in job.unfinished_checkpoints()]
    return outcome if elastic and not outcome.wrong and _losses_checked(job, outcome) else goes_on(job, outcome, elastic)


def _losses_checked(job: TrainJob, outcome: Outcome) -> bool:
    if wrong := job.wrong_losses(whole=True):
        outcome.wrong.append(wrong)
    return True


def goes_on(job: TrainJob, outcome: Outcome, elastic: bool = False) -> Outcome:
    """Start the same command again: it must resume, finish, and have logged the undisturbed run's losses."""
    if elastic:
        return outcome
    with WatchedRun([[*LADDER, *job.arguments()]], job.directory) as run:
        if run.end(START_SECONDS) is None or run.exit_codes() != [0]:
            outcome.wrong.append(f"started again it did not finish: {run.text()[-600:]!r}")
    _losses_checked(job, outcome)
    return outcome


def elastic_command(job: TrainJob) -> list[str]:
    launcher = [LADDER[0], "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(RESTARTS)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--log-dir", str(job.directory / "logs")]
    return [*launcher, *LADDER[1:], *job.arguments(None)]


def hurt(
    job: TrainJob,
    fault: str,
    detail: str,
    injury: Callable[[WatchedRun], object],
    *,
    says: str,
    codes: Sequence[int] = (1,),
    at_start: bool = False,
) -> Outcome:
    """On one host, in mid-training or ``at_start``: ``injury``, then the end as said, then on again."""
    job.prepare()
    outcome, bound = Outcome(fault, detail), 60 + 2 * job.timeout + LAUNCHER_SECONDS + SLACK_SECONDS
    with WatchedRun([[*LADDER, *job.arguments()]], job.directory) as run:
        if at_start:
            run.wait_for(lambda: len(run.ranks()) == 2, START_SECONDS, "two ranks were there")
        else:
            run.wait_for(lambda: len(job.losses()) >= 2 * job.every, START_SECONDS, "two checkpoints were begun")
        held = run.traces()
        injured = injury(run)
        outcome.ended_after_s = run.end(bound)
        if hasattr(injured, "close"):
            injured.close()
        judge_end(outcome, run, held, bound=bound, codes=set(codes), says=says, wrong_output=job.wrong_losses(whole=False))
    outcome.wrong += [f"half-written: {thing}" for thing in job.unfinished_checkpoints()]
    return goes_on(job, outcome)


def stopped(job: TrainJob) -> Outcome:
    says = rf"(rank 0 waited {job.timeout:.0f} s for rank 1 at 127\.0\.0\.1|rank 0 .*lost its peers.*imed out)"
    return hurt(job, "SIGSTOP", "rank 1", lambda run: os.kill(run.ranks()[1], signal.SIGSTOP), says=says)


def out_of_memory(job: TrainJob) -> Outcome:
    return hurt(
        job,
        "out of memory",
        "rank 1, address space",
        lambda run: limit_memory(run.ranks()[1]),
        says=r"rank 1 on .* ran out of memory",
    )


def killed_by_the_kernel(job: TrainJob) -> Outcome:
    class _Starving:
        def __init__(self, run: WatchedRun) -> None:
            self.context = starving(run.ranks()[1])
            self.context.__enter__()

        def close(self) -> None:
            self.context.__exit__(None, None, None)

    # At the start: later on so small a run takes no more memory that the kernel could refuse it.
    says = r"rank 1 of 2 .* was killed by SIGKILL"
    return hurt(job, "out of memory", "rank 1, killed by the kernel", _Starving, says=says, at_start=True)


def two_nodes(
    job: TrainJob,
    fault: str,
    *,
    environment: dict[str, str] | None = None,
    extra: Sequence[str] = (),
    says: str | None,
    prefix: Sequence[str] = (),
) -> Outcome:
    """torchrun twice, as on two hosts, with something different about the second; ``says`` None: it must not matter."""
    job.prepare()
    port, commands = free_port(), []
    for node in range(2):
        launcher = [
            LADDER[0],
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--node-rank",
            str(node),
        ]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--log-dir", str(job.directory / "logs")]
        second = node == 1
        commands.append([*(prefix if second else ()), *launcher, *LADDER[1:], *job.arguments(None, extra if second else ())])
    outcome, bound = Outcome(fault, "rank 1"), START_SECONDS + job.timeout
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(environment or {})}
    with WatchedRun(commands, job.directory, loopback) as run:
        run.wait_for(lambda: len(run.ranks()) == 2, START_SECONDS, "two ranks were there")
        held = run.traces()
        outcome.ended_after_s = run.end(bound)
        if says is not None:
            judge_end(outcome, run, held, bound=bound, codes={1}, says=says, wrong_output=None)
            outcome.wrong = [thing for thing in outcome.wrong if thing != "a traceback was printed"]  # torchrun's own
            if job.losses():
                outcome.wrong.append("steps were taken before the difference was found")
            return outcome
        outcome.bound_s, outcome.exit_codes = bound, run.exit_codes()
        if outcome.exit_codes != [0, 0]:
            outcome.wrong.append(f"the run was disturbed: {run.text()[-600:]!r}")
        outcome.wrong += [f"left behind: {thing}" for thing in run.left_over(held)]
    _losses_checked(job, outcome)
    return outcome


def clocks_apart(job: TrainJob) -> Outcome:
    uptime, environment = other_uptime(86_400), other_clock(job.directory, rank=1, seconds=86_400)
    outcome = two_nodes(job, "another clock", prefix=uptime, environment=environment, says=None)
    outcome.detail = "rank 1, wall clock" + (" and monotonic clock" if uptime else "") + " a day ahead"
    return outcome


def link_down(job: TrainJob, seconds: float | None) -> Outcome:
    """Two hosts, and nothing arrives any more for ``seconds``; None: for good."""
    job.prepare()
    outcome = Outcome("link down", "for good" if seconds is None else f"for {seconds:g} s")
    with DelayedLink(0.0005) as link:
        port, logs = free_port(), ["--log-dir", str(job.directory / "logs")]
        commands = [torchrun_on(link, host, port, ["-m", "ladder_residual", *job.arguments(None)], logs) for host in range(2)]
        with WatchedRun(commands, job.directory, {"GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1"}) as run:
            run.wait_for(lambda: len(job.losses()) >= 2 * job.every, START_SECONDS, "two checkpoints were begun")
            held = run.traces()
            link.cut()
            if seconds is not None:
                time.sleep(seconds)
                link.mend()
                outcome.bound_s = START_SECONDS
                outcome.ended_after_s = run.end(START_SECONDS)
                outcome.exit_codes = run.exit_codes()
                if outcome.exit_codes != [0, 0]:
                    outcome.wrong.append(f"did not survive: {run.text()[-600:]!r}")
                _losses_checked(job, outcome)
                return outcome
            bound = 60 + 2 * job.timeout + LAUNCHER_SECONDS + SLACK_SECONDS
            outcome.ended_after_s = run.end(bound)
            says = rf"(rank \d waited {job.timeout:.0f} s for rank \d at 10\.211|rank \d .*lost its peers.*imed out)"
            judge_end(outcome, run, held, bound=bound, codes={1}, says=says, wrong_output=job.wrong_losses(whole=False))
            outcome.wrong = [thing for thing in outcome.wrong if thing != "a traceback was printed"]
    outcome.wrong += [f"half-written: {thing}" for thing in job.unfinished_checkpoints()]
    return goes_on(job, outcome)


@contextmanager
def _small_disk(path: Path, size: str):
    """A file system of its own at ``path``, as large as asked."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def full_disk(job: TrainJob) -> Outcome:
    """Room for one checkpoint and not for two: the run ends, says so, and the first one is whole and good to go on from."""
    small = replace(job, directory=Path(tempfile.mkdtemp(prefix="disk-", dir=job.directory)))
    small.prepare()
    outcome, bound = Outcome("full disk", "room for one checkpoint"), START_SECONDS
    with _small_disk(small.run, "5m"):
        with WatchedRun([[*LADDER, *small.arguments()]], small.directory) as run:
            outcome.ended_after_s = run.end(bound)
            judge_end(
                outcome,
                run,
                run.traces(),
                bound=bound,
                codes={2},
                says="could not save step .*newest good checkpoint",
                wrong_output=None,
            )
        outcome.wrong += [f"half-written: {thing}" for thing in small.unfinished_checkpoints()]
        outcome.wrong += [f"left behind: {path}" for path in small.run.rglob("*.tmp")]
        subprocess.run(["mount", "-o", "remount,size=200m", str(small.run)], check=True)
        return goes_on(small, outcome)


def read_only(job: TrainJob) -> Outcome:
    """A run directory nobody may write to."""
    fixed = replace(job, directory=Path(tempfile.mkdtemp(prefix="fixed-", dir=job.directory)))
    fixed.prepare()
    outcome, bound = Outcome("read-only directory", "before the first step"), START_SECONDS
    with _small_disk(fixed.run, "5m"):
        subprocess.run(["mount", "-o", "remount,ro", str(fixed.run)], check=True)
        with WatchedRun([[*LADDER, *fixed.arguments()]], fixed.directory) as run:
            outcome.ended_after_s = run.end(bound)
            return judge_end(
                outcome, run, run.traces(), bound=bound, codes={2}, says="Read-only file system", wrong_output=None
            )


def named_faults(job: TrainJob) -> list[tuple[str, str | None, Callable[[], Outcome]]]:
    """(name, why it cannot be tried here or None, how)."""
    patient = replace(job, timeout=max(job.timeout, 20.0))
    no_mount = None if os.geteuid() == 0 else "mounting a small disk needs root"
    version, recipe = rf"the software of rank 1 on {HOST} \(.*\) differs", rf"the recipe of rank 1 on {HOST} differs"
    return [
        ("stop", None, lambda: stopped(job)),
        ("memory", None, lambda: out_of_memory(job)),
        ("oom-killer", why_no_cgroup(), lambda: killed_by_the_kernel(job)),
        ("link-5s", why_not(), lambda: link_down(patient, 5.0)),
        ("link", why_not(), lambda: link_down(job, None)),
        ("clock", None, lambda: clocks_apart(job)),
        ("version", None, lambda: two_nodes(job, "another version", environment=other_version(job.directory, 1), says=version)),
        ("recipe", None, lambda: two_nodes(job, "another recipe", extra=["--set", "run.seed=5"], says=recipe)),
        ("wiring", None, lambda: two_nodes(job, "another wiring", extra=["--set", "model.wiring=standard"], says=recipe)),
        ("full-disk", no_mount, lambda: full_disk(job)),
        ("read-only", no_mount, lambda: read_only(job)),
    ]
