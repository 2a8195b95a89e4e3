"""Faults during ``ladder train``: the run ends as documented and goes on from its last checkpoint, started by hand or by torchrun."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from lab.faults.generate_faults import LAUNCHER_SECONDS, SLACK_SECONDS, START_SECONDS
from lab.faults.inject import limit_memory, other_clock, other_uptime, other_version, starving, why_no_cgroup
from lab.faults.jobs import LADDER, TrainJob
from lab.faults.outcome import Outcome, judge_end
from lab.faults.watched import WatchedRun
from lab.hosts.delayed_link import DelayedLink, why_not
from lab.hosts.namespaces import free_port, torchrun, torchrun_on

HOST = re.escape(socket.gethostname())
RESTARTS = 3


def undisturbed(job: TrainJob) -> float:
    """Run once without a fault, keep its losses; seconds from the ranks' start to the end."""
    job.prepare()
    with WatchedRun([[*LADDER, *job.arguments()]], job.directory) as run:
        all_started(run, job)
        start = time.monotonic()
        if run.end(START_SECONDS) is None or run.exit_codes() != [0]:
            raise RuntimeError(f"the undisturbed run failed:\n{run.text()[-2000:]}")
        seconds = time.monotonic() - start
    job.reference = job.losses()
    return seconds


def all_started(run: WatchedRun, job: TrainJob) -> None:
    run.wait_for(lambda: len(run.ranks()) == job.ranks, START_SECONDS, f"{job.ranks} ranks were there")


def copies(job: TrainJob) -> TrainJob:
    """The same on as many ranks, each with a copy of the model: there gloo and FSDP notice a loss, not our sockets."""
    return replace(job, tp=1, dp=job.ranks, reference={})


def random_kill(
    job: TrainJob, duration: float, chance: random.Random, elastic: bool, again: bool = True
) -> Outcome | None:  # fmt: skip
    """SIGKILL to one of the ranks at a random moment; None if that was too late for it. ``elastic``: torchrun starts all again by
    itself; else a user does, unless not ``again``."""
    victim = chance.randrange(job.ranks)
    job.prepare()
    command = elastic_command(job) if elastic else [*LADDER, *job.arguments()]
    with WatchedRun([command], job.directory, {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}) as run:
        all_started(run, job)
        moment = run.wait_for_a_moment(chance, duration / 2, lambda: len(job.losses()), job.steps)
        held, ranks = run.traces(), run.ranks()
        how = "restarted by torchrun" if elastic else "started again by hand" if again else "not started again"
        outcome = Outcome("SIGKILL", f"rank {victim} (dp {job.dp} x tp {job.tp}), {moment} steps, {how}")
        if victim not in ranks:
            return None
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
            error = rf"rank {victim} of {job.ranks} \(pid {ranks[victim]}\) on {HOST} was killed by SIGKILL"
            judge_end(outcome, run, held, bound=bound, codes={1}, error=error, wrong_output=job.wrong_losses(whole=False))
    look_at_checkpoints(job, outcome)
    if not again:
        return outcome
    return has_finished(job, outcome) if elastic else goes_on(job, outcome)


def look_at_checkpoints(job: TrainJob, outcome: Outcome) -> None:
    """What a run that ended early has left of them."""
    outcome.wrong += [f"half-written: {thing}" for thing in job.unfinished_checkpoints()]
    outcome.unfinished_saves = len(job.unfinished_saves())


def has_finished(job: TrainJob, outcome: Outcome) -> Outcome:
    """After a restart: all of the undisturbed run's losses, and nothing of a save that was cut off."""
    if wrong := job.wrong_losses(whole=True):
        outcome.wrong.append(wrong)
    outcome.wrong += [f"still there after the restart: {name}" for name in job.unfinished_saves()]
    return outcome


def goes_on(job: TrainJob, outcome: Outcome) -> Outcome:
    """Start the same command again: it must resume, finish, and have logged the undisturbed run's losses."""
    with WatchedRun([[*LADDER, *job.arguments()]], job.directory) as run:
        if run.end(START_SECONDS) is None or run.exit_codes() != [0]:
            outcome.wrong.append(f"started again it did not finish: {run.text()[-600:]!r}")
    return has_finished(job, outcome)


def elastic_command(job: TrainJob) -> list[str]:
    launcher = [LADDER[0], "-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks), "--max-restarts", str(RESTARTS)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--log-dir", str(job.directory / "logs")]
    return [*launcher, *LADDER[1:], *job.arguments(by_torchrun=True)]


def inject(
    job: TrainJob,
    name: str,
    detail: str,
    fault: Callable[[WatchedRun], AbstractContextManager[None] | None],
    *,
    error: str,
    codes: Sequence[int] = (1,),
    at_start: bool = False,
    again: bool = True,
) -> Outcome:
    """On one host, in mid-training or ``at_start``: the fault, an end as documented, and with ``again`` a restart that goes on."""
    job.prepare()
    outcome, bound = Outcome(name, detail), 60 + 2 * job.timeout + LAUNCHER_SECONDS + SLACK_SECONDS
    with WatchedRun([[*LADDER, *job.arguments()]], job.directory) as run:
        if at_start:
            all_started(run, job)
        else:
            run.wait_for(lambda: len(job.losses()) >= 2 * job.every, START_SECONDS, "two checkpoints were begun")
        held = run.traces()
        with fault(run) or contextlib.nullcontext():
            outcome.ended_after_s = run.end(bound)
        judge_end(outcome, run, held, bound=bound, codes=set(codes), error=error, wrong_output=job.wrong_losses(whole=False))
    look_at_checkpoints(job, outcome)
    return goes_on(job, outcome) if again else outcome


def lost(job: TrainJob, victim: int, address: str) -> str:
    """The error of a rank whose peer is silent: by the sockets, which carry small all-reduces, or by the liveness check."""
    by_socket = rf"rank \d waited {job.timeout:.0f} s for rank {victim} at {address}: it is stopped, or the link is down"
    by_liveness_check = rf"rank \d .*lost its peers.*no answer from rank {victim} on {HOST} \(dead, stopped or cut off\)"
    return rf"({by_socket}|{by_liveness_check})" if job.dp == 1 else by_liveness_check


def killed(job: TrainJob, again: bool = True) -> Outcome:
    """SIGKILL to the last rank in mid-training."""
    victim = job.ranks - 1
    error = rf"rank {victim} of {job.ranks} \(pid \d+\) on {HOST} was killed by SIGKILL"
    layout = f"rank {victim} (dp {job.dp} x tp {job.tp})"
    return inject(job, "SIGKILL", layout, lambda run: os.kill(run.ranks()[victim], signal.SIGKILL), error=error, again=again)


def stopped(job: TrainJob, continued_after: float | None = None, again: bool = True) -> Outcome:
    """SIGSTOP: the rank is there and silent; it may be ``continued_after`` so many seconds, when the others have given it up."""
    victim = job.ranks - 1

    def stop(run: WatchedRun) -> None:
        pid = run.ranks()[victim]
        os.kill(pid, signal.SIGSTOP)
        if continued_after is not None:
            timer = threading.Timer(continued_after, _continue, [pid])
            timer.daemon = True
            timer.start()

    layout, error = f"rank {victim} (dp {job.dp} x tp {job.tp})", lost(job, victim, r"127\.0\.0\.1")
    return inject(job, "SIGSTOP", layout, stop, error=error, again=again)


def stopped_copies(job: TrainJob) -> Outcome:
    if not job.reference:
        undisturbed(job)
    return stopped(job)


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def killed_while_saving(job: TrainJob) -> Outcome:
    """SIGKILL to rank 0 while a checkpoint is being written: what is left of it is no checkpoint, and gone after the next start."""

    def kill(run: WatchedRun) -> None:
        pid = run.ranks()[0]
        while not job.unfinished_saves() and run.processes[0].poll() is None:
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    error = rf"rank 0 of {job.ranks} \(pid \d+\) on {HOST} was killed by SIGKILL"
    return inject(job, "SIGKILL", "rank 0, while it saves", kill, error=error)


def out_of_memory(job: TrainJob) -> Outcome:
    return inject(
        job,
        "out of memory",
        "rank 1, address space",
        lambda run: limit_memory(run.ranks()[1]),
        error=r"rank 1 on .* ran out of memory",
    )


def killed_by_the_kernel(job: TrainJob) -> Outcome:
    # At the start: later on so small a run takes no more memory that the kernel could refuse it.
    error = r"rank 1 of 2 .* was killed by SIGKILL"
    return inject(
        job, "out of memory", "rank 1, killed by the kernel", lambda run: starving(run.ranks()[1]), error=error, at_start=True
    )


def two_nodes(
    job: TrainJob,
    fault: str,
    *,
    environment: dict[str, str] | None = None,
    extra: Sequence[str] = (),
    error: str | None,
    prefix: Sequence[str] = (),
) -> Outcome:
    """torchrun twice, as on two hosts, with something different about the second; ``error`` None: it must not matter."""
    job.prepare()
    port, commands = free_port(), []
    for node in range(2):
        second = node == 1
        words = job.arguments(by_torchrun=True, extra=extra if second else ())
        started = torchrun(node, 2, "127.0.0.1", port, [*LADDER[1:], *words], ["--log-dir", str(job.directory / "logs")])
        commands.append([*(prefix if second else ()), *started])
    outcome, bound = Outcome(fault, "rank 1"), START_SECONDS + job.timeout
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(environment or {})}
    with WatchedRun(commands, job.directory, loopback) as run:
        all_started(run, job)
        held = run.traces()
        outcome.ended_after_s = run.end(bound)
        if error is not None:
            judge_end(outcome, run, held, bound=bound, codes={1}, error=error, wrong_output=None)
            outcome.wrong = [thing for thing in outcome.wrong if thing != "a traceback was printed"]  # torchrun's own
            if job.losses():
                outcome.wrong.append("steps were taken before the difference was found")
            return outcome
        outcome.bound_s, outcome.exit_codes = bound, run.exit_codes()
        if outcome.exit_codes != [0, 0]:
            outcome.wrong.append(f"the run was disturbed: {run.text()[-600:]!r}")
        outcome.wrong += [f"left behind: {thing}" for thing in run.left_over(held)]
    return has_finished(job, outcome)


def clocks_apart(job: TrainJob) -> Outcome:
    uptime, environment = other_uptime(86_400), other_clock(job.directory, rank=1, seconds=86_400)
    outcome = two_nodes(job, "another clock", prefix=uptime, environment=environment, error=None)
    outcome.detail = "rank 1, wall clock" + (" and monotonic clock" if uptime else "") + " a day ahead"
    return outcome


def link_down(job: TrainJob, seconds: float | None) -> Outcome:
    """Two hosts, and nothing arrives any more for ``seconds``; None: for good."""
    job.prepare()
    outcome = Outcome("link down", "for good" if seconds is None else f"for {seconds:g} s")
    with DelayedLink(0.0005) as link:
        port, logs = free_port(), ["--log-dir", str(job.directory / "logs")]
        words = ["-m", "ladder_residual", *job.arguments(by_torchrun=True)]
        commands = [torchrun_on(link, host, port, words, logs) for host in range(2)]
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
                return has_finished(job, outcome)
            bound = 60 + 2 * job.timeout + LAUNCHER_SECONDS + SLACK_SECONDS
            outcome.ended_after_s = run.end(bound)
            error = lost(job, 1, r"10\.211\.\d+\.\d+")  # rank 0 reports it: the store is on its side
            judge_end(outcome, run, held, bound=bound, codes={1}, error=error, wrong_output=job.wrong_losses(whole=False))
            outcome.wrong = [thing for thing in outcome.wrong if thing != "a traceback was printed"]
    look_at_checkpoints(job, outcome)
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
    """Room for one checkpoint and not for two: the run ends with an error, and the first checkpoint is complete."""
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
                error="could not save step .*newest good checkpoint",
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
                outcome, run, run.traces(), bound=bound, codes={2}, error="Read-only file system", wrong_output=None
            )


def named_faults(job: TrainJob, two_copies: TrainJob) -> list[tuple[str, str | None, Callable[[], Outcome]]]:
    """(name, why it cannot be tried here or None, how)."""
    patient = replace(job, timeout=max(job.timeout, 20.0))
    no_mount = None if os.geteuid() == 0 else "mounting a small disk needs root"
    version, recipe = rf"the software of rank 1 on {HOST} \(.*\) differs", rf"the recipe of rank 1 on {HOST} differs"
    return [
        ("stop", None, lambda: stopped(job)),
        ("stop-copies", None, lambda: stopped_copies(two_copies)),
        ("save", None, lambda: killed_while_saving(job)),
        ("memory", None, lambda: out_of_memory(job)),
        ("oom-killer", why_no_cgroup(), lambda: killed_by_the_kernel(job)),
        ("link-5s", why_not(), lambda: link_down(patient, 5.0)),
        ("link", why_not(), lambda: link_down(job, None)),
        ("clock", None, lambda: clocks_apart(job)),
        (
            "version",
            None,
            lambda: two_nodes(job, "another version", environment=other_version(job.directory, 1), error=version),
        ),
        ("recipe", None, lambda: two_nodes(job, "another recipe", extra=["--set", "run.seed=5"], error=recipe)),
        ("wiring", None, lambda: two_nodes(job, "another wiring", extra=["--set", "model.wiring=standard"], error=recipe)),
        ("full-disk", no_mount, lambda: full_disk(job)),
        ("read-only", no_mount, lambda: read_only(job)),
    ]
