"""Hand out inputs to worker processes, watch over them, count what they report."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 5.0  # of processor time, per input
SILENT_SECONDS = 120.0  # a worker that reports nothing for so long hangs (a busy machine is slow)
KINDS = {
    "traceback": "an exception that users would see as a traceback, or as another library's message",
    "silent": "something else was computed than the input says",
    "outside": "files outside the target changed",
    "time": "more processor time than allowed",
    "crash": "the interpreter ended or hung",
}
MEMORY_BYTES = 1 << 30  # address space beyond that of a worker that has loaded everything


@dataclass
class _Tally:
    ends: Counter[str] = field(default_factory=Counter)
    by_target: dict[str, Counter[str]] = field(default_factory=dict)
    slowest: dict[str, Any] = field(default_factory=lambda: {"seconds": 0.0})
    grown: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    say: Callable[[str], None] = lambda line: None

    def add(self, row: dict[str, Any]) -> None:
        if row["end"] != "unexpected" and row["seconds"] > SECONDS:
            row = {**row, "end": "unexpected", "kind": "time", "finding": f"took {row['seconds']:.1f} s of processor time"}
        self.ends[row["end"]] += 1
        self.by_target.setdefault(row["target"], Counter())[row["end"]] += 1
        if row["seconds"] > self.slowest["seconds"]:
            self.slowest = {key: row[key] for key in ("seconds", "number", "target")}
        if row["end"] == "unexpected":
            self.kinds[row["kind"]] += 1
            self.findings.append({key: row[key] for key in ("number", "target", "kind", "finding")})
            self.say(f"input {row['number']} ({row['target']}, {row['kind']}): {row['finding'].splitlines()[0]}")


def run_campaign(
    inputs: int,
    *,
    seed: int = 0,
    first: int = 0,
    targets: list[str],
    workers: int = 2,
    memory: int = MEMORY_BYTES,
    silent: float = SILENT_SECONDS,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """``inputs`` inputs from number ``first`` on; input ``n`` of a seed is always the same one, whoever runs it."""
    tally, lock = _Tally(say=say), threading.Lock()

    def watch(worker: int) -> None:
        begin, last = first + worker, first + inputs
        with tempfile.TemporaryDirectory(prefix="ladder-fuzz-") as directory:
            while begin < last:
                begin = _run_worker(Path(directory), seed, begin, last, workers, memory, silent, targets, tally, lock, say)

    threads = [threading.Thread(target=watch, args=(worker,)) for worker in range(min(workers, inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "benchmark": "fuzz",
        "inputs": sum(tally.ends.values()),
        "seed": seed,
        "accepted": tally.ends["accepted"],
        "refused": tally.ends["refused"],
        "unexpected": tally.ends["unexpected"],
        "kinds": {kind: tally.kinds[kind] for kind in KINDS},
        "bound_seconds": SECONDS,
        "bound_memory_bytes": memory,
        "slowest": tally.slowest,
        "memory_grown_bytes": tally.grown,
        "rows": [
            {"target": name, **{end: count[end] for end in ("accepted", "refused", "unexpected")}}
            for name, count in sorted(tally.by_target.items())
        ],
        "findings": tally.findings,
    }


def _run_worker(
    directory: Path,
    seed: int,
    begin: int,
    last: int,
    stride: int,
    memory: int,
    silent: float,
    targets: list[str],
    tally: _Tally,
    lock: threading.Lock,
    say: Callable[[str], None],
) -> int:
    """Until the worker is done, dies or hangs; the number to go on with."""
    command = [sys.executable, "-m", "lab.fuzz.worker", str(directory), str(seed), str(begin), str(last)]
    command += [str(stride), str(memory), ",".join(targets)]
    lines: queue.Queue[str | None] = queue.Queue()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = process.stdout, process.stderr
    words: list[str] = []

    def read() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(None)

    readers = [threading.Thread(target=read), threading.Thread(target=lambda: words.extend(stderr.readlines()))]
    for reader in readers:
        reader.start()
    current: dict[str, Any] = {}
    how = ""
    try:
        while True:
            try:
                line = lines.get(timeout=silent)
            except queue.Empty:
                how = f"hung: no answer within {silent:.0f} s"
                break
            if line is None:
                code = process.wait()
                how = f"the interpreter ended with code {code}: {''.join(words)[-800:]}"
                break
            row = json.loads(line)
            if row.get("done"):
                with lock:
                    tally.grown = max(tally.grown, row["grown_bytes"])
                return last
            if "begin" in row:
                current = row
                continue
            with lock:
                tally.add(row)
                total = sum(tally.ends.values())
                if total % 500 == 0:
                    say(f"{total} inputs, {tally.ends['unexpected']} unexpected")
            current = {}
    finally:
        process.kill()
        process.wait()
        for reader in readers:
            reader.join()
    if not current:
        raise RuntimeError(f"a worker could not start: {how}")
    number, target = current["begin"], current["target"]
    with lock:
        tally.add({"end": "unexpected", "number": number, "target": target, "seconds": 0.0, "kind": "crash", "finding": how})
    return number + stride
