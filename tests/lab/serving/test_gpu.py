"""The GPU run of vLLM: what would run, and the tables of a result. The run itself needs a card."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from lab.reports import serving
from lab.serving import gpu
from lab.serving.gpu_judge import LAYERS, QUANTISED, agreeing_on_ranks, write_small
from lab.serving.gpu_pack import BINARY, FATBIN_MAGIC, HOPPER, keep_architecture
from lab.serving.gpu_parts import PARTS
from ladder_residual.distributed import call
from ladder_residual.models.loading import load_model
from ladder_residual.models.quantization.checkpoint import QuantizedCheckpoint, open_checkpoint
from tests.forked import fork_command

OWN = {"wiring": "own", "tp": 2, "transport": "nccl", "model": "llama-3.1-8b", "overlap": None}
LADDER = OWN | {"wiring": "ladder"}
ENGINES = {"own": OWN, "auto": LADDER, "beside": LADDER | {"overlap": "always"}, "line": LADDER | {"overlap": "never"}}


def result(**parts: Any) -> dict[str, Any]:
    return {"benchmark": "vllm-gpu", "parts": parts, "environment": {"gpu": "A card", "vllm": "0.26.0", "commit": "abc"}}


def row(name: str, **ms: float | list[float]) -> dict[str, Any]:
    """Milliseconds by engine, of one round or of several."""
    rounds = {engine: each if isinstance(each, list) else [each] for engine, each in ms.items()}
    return {"name": name, "samples": {engine: [{"ms": one} for one in each] for engine, each in rounds.items()}}


def test_the_plugins_own_choice_is_compared_with_vllms_model() -> None:
    rows = [
        row("batch 1", own=[9.0, 10.0, 9.0], auto=[6.0, 5.0, 6.0]),
        row("batch 16", own=9.0),
        {"name": "batch 64", "message": "no time was left"},
    ]
    (page,) = serving.on_one_card({"gpu": result(nccl={"engines": ENGINES, "rows": rows})})
    assert "| NCCL | batch 1 | 9.00 | 6.00 | 1.50x | 3: 1.50x to 2.00x |" in page
    assert "batch 16" not in page
    assert "batch 64" not in page
    assert "--parts nccl" in page
    assert "A card" in page


def test_ways_to_run_an_all_reduce_have_a_table_of_their_own() -> None:
    rows = [row("5 us", own=3.0, beside=3.5, line=3.0), row("64 us", beside=5.0, line=9.0)]
    (page,) = serving.on_one_card({"gpu": result(emulated={"engines": ENGINES, "rows": rows})})
    assert "| 70B | 5 us | 3.00 | 3.00 | 3.50 |" in page
    assert "| 70B | 64 us |  | 9.00 | 5.00 |" in page


def test_tokens_are_shares() -> None:
    engines = {"own": OWN | {"model": "small", "tp": 1}, "line": ENGINES["line"] | {"model": "small-fp8"}}
    engines["pieces"] = ENGINES["beside"] | {"model": "small", "graphs": "PIECEWISE"}
    tokens = {"own": {"chosen": 180, "of": 192}, "line": {"message": "did not start"}, "pieces": {"chosen": 3, "of": 4}}
    (page,) = serving.on_one_card({"gpu": result(parity={"engines": engines, "tokens": tokens})})
    assert "| vLLM's own | bf16 | one rank | 180 of 192 |" in page
    assert "| ladder, in line | fp8 | 2 ranks, nccl | did not start |" in page
    assert "| ladder, beside, piecewise graphs | bf16 | 2 ranks, nccl | 3 of 4 |" in page


def test_of_a_part_in_several_results_the_last_counts() -> None:
    runs = [result(tp1={"engines": ENGINES, "rows": [row("batch 1", own=9.0, auto=ms)]}) for ms in (9.0, 3.0)]
    runs.append(
        result(tp1={"message": "skipped: 3 s were left"}, ipc={"engines": ENGINES, "rows": [row("batch 1", own=1.0, auto=1.0)]})
    )
    (page,) = serving.on_one_card({f"gpu-{number}": run for number, run in enumerate(runs)})
    assert "3.00x" in page
    assert "9.00 | 9.00" not in page
    assert "| IPC | batch 1 | 1.00 | 1.00 | 1.00x | 1 |" in page
    assert page.count("Made by") == 1


def test_parts_that_failed_leave_no_section() -> None:
    assert serving.on_one_card({"gpu": result(nccl={"message": "skipped: 3 s were left"})}) == []
    assert serving.on_one_card({}) == []


def test_every_part_has_its_place_in_the_tables() -> None:
    """And with the parts that are published the page is no longer than a page may be."""
    parts = {
        name: {
            "engines": {engine.name: engine.described() for engine in part.engines},
            "rows": [
                each.described() | {"samples": {engine.name: [{"ms": 2.0}] for engine in part.engines}}
                for each in part.measurements
            ],
            "tokens": {engine.name: {"chosen": 1, "of": 2} for engine in part.engines} if part.judge else {},
        }
        for name, part in PARTS.items()
    }
    cpu = {name: found for name, found in serving.read_results("serve").items() if name.startswith("cpu")}
    published = {name: parts[name] for name in ("tp1", "ipc", "nccl", "emulated", "parity", "fp8", "int4")}
    assert len(serving.render(cpu | {"gpu": result(**published)}).split()) <= 1500
    page = serving.render(cpu | {"gpu": result(**parts)})
    for part in PARTS.values():
        assert all(f"| {each.name} |" in page for each in part.measurements)
    assert page.count("2 ranks, ") == sum(engine.tp > 1 for part in PARTS.values() if part.judge for engine in part.engines)


def test_a_wiring_that_depends_on_the_ranks_is_judged_on_as_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call.subprocess, "run", fork_command)
    write_small(tmp_path, "small")
    given = [[5, 6, 7, 8, 9], [10, 11, 12]]
    model = load_model(tmp_path / "small", wiring="ladder", dtype="float32")
    answers = [model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist() for ids in given]
    assert agreeing_on_ranks(tmp_path / "small", "ladder", 2, given, answers) == 16
    assert agreeing_on_ranks(tmp_path / "small", "delayed-1", 2, given, answers) < 16


def test_what_the_plugin_chose_is_read_from_its_log() -> None:
    line = "INFO 11-19 [communicator.py:134] All-reduces run beside the modules for batches of about 1, 4 tokens, else in line "
    assert (
        gpu.choice_in(f"{line}(VLLM_LADDER_OVERLAP=auto)\n")
        == "beside the modules for batches of about 1, 4 tokens, else in line"
    )
    assert gpu.choice_in("INFO 11-19 Residual wiring: ladder") is None


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


@pytest.mark.parametrize("name", QUANTISED)
def test_the_judge_computes_with_what_the_engines_load(name: str, tmp_path: Path) -> None:
    write_small(tmp_path, name)
    judged, engines = load_file(tmp_path / f"{name}-judge" / "model.safetensors"), open_checkpoint(tmp_path / name)
    assert isinstance(engines, QuantizedCheckpoint)
    assert len(engines.weights) == 7 * LAYERS
    assert all(torch.equal(engines.read(key), tensor) for key, tensor in judged.items())
    config = json.loads((tmp_path / name / "config.json").read_text())
    assert (config["architectures"], config["torch_dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    if name == "small-fp8":
        scale = engines.read_stored("model.layers.0.mlp.up_proj.weight_scale", None)
        assert scale.dtype == torch.bfloat16  # as the package writes it


@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_every_part_fits_the_card(part: Any) -> None:
    assert sum(engine.gigabytes for engine in part.engines) < gpu.CARD_GB
    assert part.measurements or part.judge
