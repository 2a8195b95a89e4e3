"""Commands that write and are killed while they do: ``ladder convert --overwrite`` and ``ladder data prepare``.

Killed at any change of a directory, the old or the new is there, and the same command finishes the work.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lab.faults.inject import KillAt
from lab.faults.outcome import Outcome
from lab.fuzz.box import fingerprint


@dataclass
class WriterJob:
    """A command that turns a source into a directory; ``good`` are the states of that directory a user may find."""

    directory: Path
    what: str
    states: dict[str, dict[str, str]] = field(default_factory=dict)  # old and new
    changes: int = 0  # of directories, in an undisturbed run

    @property
    def target(self) -> Path:
        return self.directory / "work" / "target"

    def command(self) -> list[str]:
        """After ``ladder``."""
        source = str(self.directory / "source")
        if self.what == "convert":
            return ["convert", source, str(self.target), "--wiring", "ladder", "--overwrite"]
        words = ["data", "prepare", f"{source}/texts.jsonl", str(self.target), "--tokenizer", source]
        return [*words, "--shard-tokens", "400", "--workers", "1"]

    def prepare(self) -> None:
        """The target as a user has it before the command."""
        from ladder_residual.bench.demo import demo_directory
        from ladder_residual.models.convert import convert

        if not (self.directory / "source").exists():
            shutil.copytree(demo_directory(), self.directory / "source")
            texts = (self.directory / "source" / "stories.txt").read_text(encoding="utf-8").split("\n\n")
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (self.directory / "source" / "texts.jsonl").write_text(lines, encoding="utf-8")
        shutil.rmtree(self.target.parent, ignore_errors=True)
        self.target.parent.mkdir(parents=True)
        if self.what == "convert":
            convert(self.directory / "source", self.target, "standard", copy=True)

    def state(self) -> str:
        """What the target is now: old, new, or something else, in words."""
        now = fingerprint(self.target) if self.target.exists() else {}
        name = next((name for name, state in self.states.items() if state == now), None)
        return name or f"neither old nor new: {sorted(now)[:9]}"

    def run(self, number: int = 0) -> int:
        """The command in a fork of this process, which has imported everything; killed at change ``number``. Its exit code."""
        import ladder_residual.cli.main
        import ladder_residual.data.prepare
        import ladder_residual.models.convert

        child = os.fork()
        if child == 0:
            with (self.directory / "output.txt").open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            hook = KillAt(number, self.target.parent)
            sys.addaudithook(hook)
            sys.argv = ["ladder", *self.command()]
            code = 1
            try:
                ladder_residual.cli.main.main()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                (self.directory / "changes.txt").write_text(str(hook.count))
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def text(self) -> str:
        return (self.directory / "output.txt").read_text(encoding="utf-8", errors="replace")


def undisturbed(job: WriterJob) -> float:
    """Run once without a fault, keep what it wrote and count the changes; seconds."""
    job.prepare()
    job.states["old"] = fingerprint(job.target) if job.target.exists() else {}
    start = time.monotonic()
    if job.run() != 0:
        raise RuntimeError(f"the undisturbed run failed:\n{job.text()[-2000:]}")
    job.states["new"], job.changes = fingerprint(job.target), int((job.directory / "changes.txt").read_text())
    return time.monotonic() - start


def moments(job: WriterJob, rounds: int) -> Iterator[int]:
    """Every change, or ``rounds`` of them evenly spread where there are more."""
    count = job.changes if job.what == "convert" else min(rounds, job.changes)
    yield from (1 + index * job.changes // count for index in range(count))


def killed_at(job: WriterJob, number: int) -> Outcome:
    """SIGKILL just before the ``number``-th change; then the same command again."""
    job.prepare()
    outcome, start = Outcome("SIGKILL", f"before change {number} of {job.changes}"), time.monotonic()
    outcome.exit_codes, outcome.ended_after_s = [job.run(number)], time.monotonic() - start
    if outcome.exit_codes != [-signal.SIGKILL]:
        outcome.wrong.append(f"exit codes {outcome.exit_codes}: it was not killed")
    if job.what == "convert":
        outcome.detail += f", left {job.state()}"
        if job.state() not in job.states:
            outcome.wrong.append(job.state())
    elif (job.target / "index.json").exists() and job.state() != "new":
        unfinished = {name for name in fingerprint(job.target) if name not in job.states["new"]}
        if unfinished != {"progress.json"}:
            outcome.wrong.append(f"an index of a corpus that is not whole: {job.state()}")
    outcome.unfinished_saves = sum(path != job.target for path in job.target.parent.iterdir())
    if job.run() != 0:
        outcome.wrong.append(f"run again it did not finish: {job.text()[-600:]!r}")
    if job.state() != "new":
        outcome.wrong.append(f"after the second run the target is {job.state()}")
    return outcome
