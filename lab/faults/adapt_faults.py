"""Kills of ``ladder adapt`` on two ranks, with DDP and with FSDP: run again it goes on to the losses of the undisturbed run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from lab.faults.generate_faults import HOST, LAUNCHER_SECONDS, SLACK_SECONDS, START_SECONDS
from lab.faults.outcome import Outcome, judge_end
from lab.faults.watched import WatchedRun

ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
# As `ladder train --ranks 2` starts its ranks; `ladder adapt` leaves that to torchrun, which imports everything on each of them.
LAUNCHER = "import sys; from ladder_residual.distributed.launch import launch; sys.exit(launch(sys.argv[1:], 2))"


@dataclass
class AdaptJob:
    """Distillation of the demo model into a converted copy, with a checkpoint every few steps."""

    directory: Path
    parallel: str = "ddp"
    steps: int = 24
    every: int = 4
    reference: dict[int, float] = field(default_factory=dict)  # losses of an undisturbed run, by step

    @property
    def output(self) -> Path:
        return self.directory / f"recovered-{self.parallel}"

    @property
    def training(self) -> Path:
        return self.output.with_name(self.output.name + ".training")

    def prepare(self) -> None:
        """Models and a text, and no run yet."""
        from ladder_residual.bench.demo import demo_directory
        from ladder_residual.models.convert import convert

        self.directory.mkdir(parents=True, exist_ok=True)
        if not (self.directory / "student").exists():
            convert(demo_directory(), self.directory / "teacher", "standard", copy=True)
            convert(self.directory / "teacher", self.directory / "student", "ladder", copy=True)
        for path in (self.output, self.training):
            shutil.rmtree(path, ignore_errors=True)

    def command(self) -> list[str]:
        words = ["adapt", str(self.directory / "student"), "--teacher", str(self.directory / "teacher"), "--device", "cpu"]
        words += ["--data", str(self.directory / "teacher" / "stories.txt"), "--out", str(self.output), "--lr", "1e-3"]
        words += ["--sequence", "64", "--batch-tokens", "512", "--tokens", str(512 * self.steps), "--log-every", "1"]
        return [sys.executable, "-c", LAUNCHER, *words, "--save-every", str(self.every), "--parallel", self.parallel]

    def losses(self) -> dict[int, float]:
        path = self.training / "log.jsonl"
        content = path.read_text(encoding="utf-8") if path.exists() else ""
        entries = [json.loads(line) for line in content.split("\n")[:-1] if line.endswith("}")]
        return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}

    def wrong_losses(self) -> str | None:
        """What is wrong with the losses of a run that should have finished."""
        losses = self.losses()
        if sorted(losses) != sorted(self.reference):
            return f"steps {sorted(losses)} were logged, expected 1 to {self.steps}"
        worst = max(abs(loss / self.reference[step] - 1) for step, loss in losses.items())
        return f"a loss differs by {worst:.1e} from the undisturbed run's" if worst > 1e-6 else None


def undisturbed(job: AdaptJob) -> float:
    """Run once without a fault, keep its losses; seconds from the ranks' start to the end."""
    job.prepare()
    with WatchedRun([job.command()], job.directory, ENVIRONMENT) as run:
        run.wait_for(lambda: len(run.ranks()) == 2, START_SECONDS, "two ranks were there")
        start = time.monotonic()
        if run.end(START_SECONDS) is None or run.exit_codes() != [0]:
            raise RuntimeError(f"the undisturbed run failed:\n{run.text()[-2000:]}")
    job.reference = job.losses()
    return time.monotonic() - start


def random_kill(job: AdaptJob, duration: float, chance: random.Random) -> Outcome | None:
    """SIGKILL to one of two ranks at a random moment; None if that was too late for it. Then the same command again."""
    victim = chance.randrange(2)
    job.prepare()
    with WatchedRun([job.command()], job.directory, ENVIRONMENT) as run:
        run.wait_for(lambda: len(run.ranks()) == 2, START_SECONDS, "two ranks were there")
        moment = run.wait_for_a_moment(chance, duration / 2, lambda: len(job.losses()), job.steps)
        held, ranks, done = run.traces(), run.ranks(), len(job.losses())
        if victim not in ranks:
            return None
        outcome = Outcome("SIGKILL", f"rank {victim} of {job.parallel}, {moment} steps")
        os.kill(ranks[victim], signal.SIGKILL)
        bound = 2 * LAUNCHER_SECONDS + SLACK_SECONDS
        outcome.ended_after_s = run.end(bound)
        error = rf"rank {victim} of 2 \(pid {ranks[victim]}\) on {HOST} was killed by SIGKILL"
        judge_end(outcome, run, held, bound=bound, codes={1}, error=error, wrong_output=None)
    if job.output.exists():  # it was killed as it ended: the result must be whole
        if run.exit_codes() == [0]:
            return None
        outcome.detail += ", its result written"
        return has_result(job, outcome)
    with WatchedRun([job.command()], job.directory, ENVIRONMENT) as run:
        if run.end(START_SECONDS) is None or run.exit_codes() != [0]:
            outcome.wrong.append(f"started again it did not finish: {run.text()[-600:]!r}")
            return outcome
        if done > 2 * job.every and "resume   " not in run.text():
            outcome.wrong.append(f"it began again although {done} steps had been taken")
    return has_result(job, outcome)


def has_result(job: AdaptJob, outcome: Outcome) -> Outcome:
    """All losses of the undisturbed run, and a result that loads."""
    from ladder_residual.models.loading import load_model

    if wrong := job.wrong_losses():
        outcome.wrong.append(wrong)
    try:
        load_model(job.output)
    except ValueError as error:
        outcome.wrong.append(f"the result cannot be loaded: {error}")
    return outcome
