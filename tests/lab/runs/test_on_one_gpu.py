"""The plan of a GPU session: what it runs exists and fits its time; parts end in time with what they started."""

import importlib.util
import io
import time
from pathlib import Path

import pytest

from lab.runs import on_one_gpu
from lab.runs.engine_real_ranks import PARTS as RANK_PARTS
from lab.runs.on_one_gpu import PARTS, SECONDS, Part
from lab.serving.gpu_parts import PARTS as SERVED

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("call", PARTS)
def test_a_call_runs_what_there_is_and_ends_in_time(call):
    assert sum(part.seconds for part in PARTS[call]) <= SECONDS + 45  # the last begins if half a minute is left
    for part in PARTS[call]:
        words = part.arguments.split()
        assert importlib.util.find_spec(words[1]) if words[0] == "-m" else (ROOT / words[0]).exists()
        if "--parts" in words:
            known = SERVED if words[1] == "lab.serving.gpu" else RANK_PARTS
            assert set(words[words.index("--parts") + 1].replace("+", ",").split(",")) <= set(known)


def test_the_dry_run_starts_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["on_one_gpu", "ranks", "--parts", "losses", "--dry-run", "--out", str(tmp_path / "out")])
    on_one_gpu.main()
    assert (
        capsys.readouterr().out
        == "losses: at most 120 s, with MPS: python tests/gpu/test_train_ranks_gpu.py --out OUT/train-losses.json\n"
    )
    assert not (tmp_path / "out").exists()


def test_parts_end_in_time(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys, time\nprint(sys.argv[1], flush=True)\ntime.sleep(float(sys.argv[2]))\nsys.exit(3)\n"
    )
    with (tmp_path / "log").open("w") as log:
        done = on_one_gpu.run(Part("short", 60, f"{program} OUT/a.json 0"), tmp_path, log, time.monotonic() + 60)
        endless = on_one_gpu.run(Part("endless", 1, f"{program} b 600"), tmp_path, log, time.monotonic() + 60)
    assert done.startswith("short: exit code 3 after")
    assert endless.startswith("endless: not done after")
    assert f"{tmp_path}/a.json" in (tmp_path / "log").read_text()
    late = on_one_gpu.run(Part("late", 60, "-m nothing"), tmp_path, io.StringIO(), time.monotonic() + 5)
    assert late == "late: not begun, 5 s were left"
