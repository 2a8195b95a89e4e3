"""Unpack what ``lab.serving.gpu_pack`` packed, with the standard library alone.

    python lab/serving/gpu_unpack.py ARCHIVES TARGET
    export PYTHONPATH=TARGET:src:.

vLLM finds plugins by the metadata of installed distributions, so TARGET gets that of this project and of the rank mapper.
"""

from __future__ import annotations

import lzma
import sys
import tarfile
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GROUP = "vllm.general_plugins"
RANKS_ON_ONE_CARD = "lab.serving.one_card:register"


def unpack(archives: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    packed = sorted(archives.glob("first/*.tar.xz"))
    if not packed:
        raise ValueError(f"{archives} holds no first/*.tar.xz: make them with python -m lab.serving.gpu_pack {archives}")
    with ProcessPoolExecutor(len(packed)) as pool:
        list(pool.map(_unpack_one, packed, [target] * len(packed)))
    for library in archives.glob("second/*.so.xz"):
        (target / "vllm" / library.stem).write_bytes(lzma.decompress(library.read_bytes()))
    write_plugins(target)


def write_plugins(target: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project.get("version", "0.0.0")
    _write_metadata(target, "ladder_residual", version, project["entry-points"][GROUP])
    _write_metadata(target, "ladder_residual_lab", version, {"ladder_residual_lab": RANKS_ON_ONE_CARD})


def _write_metadata(target: Path, name: str, version: str, plugins: dict[str, str]) -> None:
    folder = target / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    lines = [f"[{GROUP}]", *(f"{plugin} = {function}" for plugin, function in plugins.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _unpack_one(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as packed:
        for member in packed:  # `extractall` fails where another process makes the same folder first
            (target / member.name).parent.mkdir(parents=True, exist_ok=True)
            packed.extract(member, target, filter="data")


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
