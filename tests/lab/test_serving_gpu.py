"""The GPU run of vLLM: what would run, and the tables of a result. The run itself needs a card."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.reports import serving
from lab.serving import gpu
from lab.serving.gpu_pack import BINARY, FATBIN_MAGIC, HOPPER, keep_architecture
from lab.serving.gpu_parts import PARTS

ENGINES = {
    "own": {"wiring": "own", "tp": 2, "transport": "nccl", "overlap": None, "start_s": 50.0},
    "ladder": {"wiring": "ladder", "tp": 2, "transport": "nccl", "overlap": "always", "start_s": 50.0},
    "broken": {"wiring": "ladder", "tp": 2, "transport": "ipc", "overlap": "never", "start_s": 0.0, "error": "did not start"},
}


def result(**parts: Any) -> dict[str, Any]:
    return {"benchmark": "vllm-gpu", "parts": parts, "environment": {"gpu": "A card", "vllm": "0.26.0", "commit": "abc"}}


def test_times_are_compared_with_vllms_own() -> None:
    rows = [
        {"name": "time per token, batch 1", "ms": {"own": 9.0, "ladder": 6.0}},
        {"name": "time per token, batch 64", "ms": {}, "errors": {"own": "gone"}},
    ]
    (page,) = serving.on_one_card("gpu", result(nccl={"engines": ENGINES, "rows": rows}))
    assert "| time per token, batch 1 | 9.00 | 6.00 | 1.50x |" in page
    assert "ladder, beside" in page
    assert "in line" not in page  # nothing was measured of it
    assert "batch 64" not in page
    assert "--parts nccl" in page
    assert "A card" in page


def test_without_vllms_own_model_there_is_no_speed_up() -> None:
    rows = [{"name": "time per token, batch 1", "ms": {"ladder": 6.0}}]
    (page,) = serving.on_one_card("gpu", result(**{"nccl-overlap": {"engines": ENGINES, "rows": rows}}))
    assert "| time per token, batch 1 | 6.00 |" in page
    assert "speed-up" not in page


def test_tokens_are_shares() -> None:
    tokens = {"own": {"chosen": 180, "of": 192}, "broken": {"error": "did not start"}}
    (page,) = serving.on_one_card("gpu", result(parity={"engines": ENGINES, "rows": [], "tokens": tokens}))
    assert "| vLLM's own | 2 ranks, nccl | 180 of 192 |" in page
    assert "did not start" in page


def test_a_part_that_failed_leaves_no_section() -> None:
    assert serving.on_one_card("gpu", result(nccl={"error": "skipped: 3 s were left"})) == []


def test_the_dry_run_says_how_long_and_how_much() -> None:
    found = CliRunner().invoke(gpu.app, ["--dry-run", "--parts", "nccl+ipc,tp1+parity"])
    assert found.exit_code == 0
    assert "nccl+ipc: 4 engines" in found.output
    assert "s of GPU time" in found.output


def test_what_cannot_run_is_refused() -> None:
    runner = CliRunner()
    unknown = runner.invoke(gpu.app, ["--dry-run", "--parts", "nccl,tp3"])
    assert "unknown part 'tp3'; choose from" in str(unknown.exception)
    large = runner.invoke(gpu.app, ["--dry-run", "--parts", "nccl+ipc+tp1"])
    assert "needs 156 GB at once of 130" in str(large.exception)


def test_engines_of_all_parts_have_names_of_their_own() -> None:
    names = [engine.name for name, part in PARTS.items() if name != "load" for engine in part.engines]
    assert len(names) == len(set(names))


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary of (kind, architecture, image), laid out as CUDA does."""
    images = b"".join(
        struct.pack("<HHIQ", kind, 0, 64, len(image)) + bytes(12) + struct.pack("<I", architecture) + bytes(32) + image
        for kind, architecture, image in entries
    )
    return struct.pack("<IHHQ", FATBIN_MAGIC, 1, 16, len(images)) + images


def library(section: bytes) -> bytes:
    """As little of ELF as names one section."""
    names, header = b"\0.nv_fatbin\0", 64
    at_section, at_names = header, header + len(section)
    table = at_names + len(names)
    head = bytearray(header)
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, 2, 1)

    def entry(name: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQ", name, 1, 0, 0, offset, size) + bytes(24)

    return bytes(head) + section + names + entry(1, at_section, len(section)) + entry(0, at_names, len(names))


def test_a_packed_library_keeps_the_kernels_of_one_architecture() -> None:
    hopper, older, ptx = b"HOPPER" * 4, b"AMPERE" * 4, b"PTX90PTX" * 3
    whole = library(fat_binary((BINARY, 80, older), (BINARY, HOPPER, hopper)) + bytes(8) + fat_binary((1, HOPPER, ptx)))
    kept = keep_architecture(whole, HOPPER)
    assert len(kept) == len(whole)
    assert hopper in kept
    assert older not in kept
    assert ptx not in kept
    assert kept == whole.replace(older, bytes(len(older))).replace(ptx, bytes(len(ptx)))


def test_the_whole_page_still_has_the_cpu_tables() -> None:
    results = serving.read_results("serve")
    assert "## Two ranks on CPU" in serving.render(results)
    with_gpu = {**results, "gpu": result(nccl={"engines": ENGINES, "rows": [{"name": "x", "ms": {"own": 2.0, "ladder": 1.0}}]})}
    assert "## On one GPU: Two ranks, NCCL over sockets" in serving.render(with_gpu)


@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_every_part_fits_the_card(part: Any) -> None:
    assert sum(engine.gigabytes for engine in part.engines) < gpu.CARD_GB
    assert part.measurements or part.judge
