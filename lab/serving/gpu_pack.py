"""vLLM for a GPU machine where nothing can be installed: archives that are carried there and unpacked.

    python -m lab.serving.gpu_pack DIRECTORY              # download, shrink, pack
    python -m lab.serving.gpu_unpack DIRECTORY TARGET     # over there; TARGET goes on PYTHONPATH

The machine has Python 3.12, torch, Triton and transformers. ``first`` is all that a Hopper card needs. Its libraries keep the kernels of
that architecture alone. ``second`` holds the largest library as vLLM ships it, in case the shrunk one does not load.
"""

from __future__ import annotations

import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ladder_residual.distributed.launch import run_command

VLLM = "vllm==0.26.0"
PYTHON = "3.12"
GLIBC = ("manylinux_2_35", "manylinux_2_34", "manylinux_2_31", "manylinux_2_28", "manylinux_2_17", "manylinux2014")
REQUIREMENTS = Path(__file__).with_name("gpu-requirements.txt")
LARGEST = "vllm/_C_stable_libtorch.abi3.so"
# Flash attention for older cards, another server, headers, kernels for Blackwell and other Pythons, data of tokenizers and countries.
LEFT_OUT = (
    *("vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/_qutlass_C", "vllm/_flashmla", "vllm/third_party/fmha_sm100"),
    *(
        "vllm/third_party/deep_gemm/include",
        "vllm/third_party/deep_gemm/_C.cpython-310",
        "vllm/third_party/deep_gemm/_C.cpython-311",
    ),
    *("vllm/third_party/deep_gemm/_C.cpython-313", "vllm/third_party/deep_gemm/_C.cpython-314"),
    *("mistral_common/data/", "pycountry/locales/"),
)
HOPPER = 90
FATBIN_MAGIC = 0xBA55ED50
BINARY = 2  # an entry's kind; 1 is PTX

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def pack(
    directory: Annotated[Path, typer.Argument(help="Where the archives go; the folders `first` and `second` in it.")],
) -> None:
    """Download vLLM and what it needs, and pack both for a GPU machine without installs."""
    with tempfile.TemporaryDirectory(prefix="gpu-pack-") as scratch:
        wheels, tree = Path(scratch, "wheels"), Path(scratch, "tree")
        download(wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tree, members=[name for name in archive.namelist() if not name.startswith(LEFT_OUT)])
        second = directory / "second"
        second.mkdir(parents=True, exist_ok=True)
        with lzma.open(second / f"{Path(LARGEST).name}.xz", "wb", preset=6) as packed:
            packed.write((tree / LARGEST).read_bytes())
        libraries = sorted(tree.glob("vllm/**/*.so"))
        for library in libraries:
            library.write_bytes(keep_architecture(library.read_bytes(), HOPPER))
        first = directory / "first"
        shutil.rmtree(first, ignore_errors=True)
        first.mkdir(parents=True)
        # Several archives, unpacked side by side.
        everything = [path for path in sorted(tree.rglob("*")) if path.is_file()]
        large = {library for library in libraries if library.stat().st_size > 1e7}
        for library in sorted(large):
            _pack(first / f"{library.name}.tar.xz", tree, [library])
        _pack(first / "python.tar.xz", tree, [path for path in everything if path not in large])
    for path in sorted(directory.glob("*/*.xz")):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def download(wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    command += ["--python-version", PYTHON, "--only-binary=:all:"]
    command += [option for name in GLIBC for option in ("--platform", f"{name}_x86_64")]
    subprocess.run([*command, VLLM, "-r", str(REQUIREMENTS)], check=True)


def keep_architecture(library: bytes, architecture: int) -> bytes:
    """The library with zeros in place of the kernels of all other architectures. Every offset and header stays where it was: the
    driver chooses an entry by its header and never reads the others."""
    kept = bytearray(library)
    for offset, size in _sections(library, b".nv_fatbin"):
        for start, length, kind, of in _entries(library, offset, offset + size):
            if (kind, of) != (BINARY, architecture):
                kept[start : start + length] = bytes(length)
    return bytes(kept)


def _sections(elf: bytes, wanted: bytes) -> Iterator[tuple[int, int]]:
    """Offset and size of the sections of this name."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + number * entry) for number in range(count)]
    for name, _, _, _, offset, size in headers:
        start = headers[names][4] + name
        if elf[start : elf.index(b"\0", start)] == wanted:
            yield offset, size


def _entries(elf: bytes, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Offset and length of each kernel image of a section of fat binaries, its kind and its architecture."""
    while position < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", elf, position)
        if magic != FATBIN_MAGIC:
            position += 8  # between two fat binaries
            continue
        position += header
        last = position + size
        while position < last:
            kind, _, header, size = struct.unpack_from("<HHIQ", elf, position)
            (architecture,) = struct.unpack_from("<I", elf, position + 28)
            yield position + header, size, kind, architecture
            position += header + size


def _pack(archive: Path, tree: Path, files: list[Path]) -> None:
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in files:
            packed.add(path, path.relative_to(tree))


if __name__ == "__main__":
    run_command(app)
