"""One process of the fuzzer: runs inputs one after another and reports each on standard output, so that what kills or hangs it is known.

python -m lab.fuzz.worker DIRECTORY SEED FIRST COUNT STRIDE MEMORY_BYTES TARGET,TARGET
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any


def main() -> None:
    directory, seed, first, count, stride, memory, names = sys.argv[1:]
    report = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print is not our report
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import torch
    import transformers

    from lab.fuzz.box import Box
    from lab.fuzz.judge import SilentError
    from lab.fuzz.targets import TARGETS
    from lab.fuzz.verdict import is_meant

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    box = Box(Path(directory))
    os.environ["HOME"] = str(box.outside)
    os.chdir(box.outside)  # what is written with a relative path is seen, too
    chosen = names.split(",")
    _warm_up(box, [TARGETS[name] for name in chosen])
    base = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (base + int(memory), resource.RLIM_INFINITY))
    for turn, number in enumerate(range(int(first), int(count), int(stride))):
        if turn % 20 == 0:
            gc.collect()  # groups and readers of runs that were refused hold threads and files until then
        name = chosen[number % len(chosen)]
        report.write(json.dumps({"begin": number, "target": name}) + "\n")
        start, kind, finding = time.process_time(), None, None
        try:
            TARGETS[name](box, Random(f"{seed}:{number}"))
            end = "accepted"
        except BaseException as error:
            end = "refused" if isinstance(error, ValueError) and is_meant(error) else "unexpected"
            if end == "unexpected":
                kind = "silent" if isinstance(error, SilentError) else "traceback"
                finding = f"{type(error).__name__}: {str(error)[:300]}\n{traceback.format_exc()[-1500:]}"
        if changed := box.changed():
            end, kind, finding = "unexpected", "outside", f"files outside the target changed: {changed}"
        row = {"end": end, "number": number, "target": name, "seconds": time.process_time() - start}
        row |= {"kind": kind, "finding": finding}
        report.write(json.dumps(row) + "\n")
    report.write(json.dumps({"done": True, "grown_bytes": max(0, _peak() - base)}) + "\n")


def _warm_up(box: Any, targets: list[Any]) -> None:
    """Imports, and what targets make once, are no part of an input's time and memory."""
    from lab.fuzz.targets.demo import demo_model

    demo_model()
    for target in targets:
        with contextlib.suppress(Exception):
            target(box, Random("warm-up"))
    box.restore()


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    return 0


def _address_space() -> int:
    return _status("VmSize:")


def _peak() -> int:
    return _status("VmPeak:")


if __name__ == "__main__":
    main()
