"""Every kernel compiles for sm_90, and the compiler keeps what they rely on: what is loaded before the wait, and from where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ladder_residual.engine.cuda.pdl import PdlMode


@pytest.mark.slow
def test_every_kernel_of_a_step_compiles_for_hopper(tmp_path) -> None:
    """Without a GPU: the assembler comes with Triton. What would not start on one (too much shared memory) shows here."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_for_hopper.py")],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {made["kernel"] for made in compiled} >= {
        "norm_gemv", "dequantize", "persistent_norm_gemv", "persistent_norm_gemv_smem", "gemv", "small_batch_gemm", "decode_attention",
        "rotate_and_store", "add_rms_norm", "silu_and_mul", "timed_copy",
    }  # fmt: skip
    for made in compiled:
        constants, pdl = made["constants"], made["constants"].get("PDL", PdlMode.OFF)
        assert made["shared"] <= 227 << 10, made
        assert made["waits"] == (pdl != PdlMode.OFF), made
        assert made["tensor_cores"] == (made["kernel"] in ("small_batch_gemm", "decode_attention")), made
        if made["kernel"] == "small_batch_gemm" and constants["K"] > 2 * constants["BLOCK_K"]:
            assert made["copies_ahead"], made
        if made["kernel"] == "persistent_norm_gemv_smem":  # its first tiles are loaded before the previous kernel has ended
            assert made["copies_before_the_wait"] == constants["SMEM_TILES"], made
        assert (made["loads_past_l1"] > 0) == (pdl >= PdlMode.WAIT_AFTER_COMPUTE), made
        if made["kernel"] == "persistent_norm_gemv" and pdl == PdlMode.WAIT_BEFORE_NEWEST:
            # both blocks are loaded before the first is multiplied: ``_opaque_zero`` keeps the compiler to it
            blocks = 2 if constants["PREFETCH_SECOND"] else 1
            loads = constants["ROWS"] * constants["WIDTH"] // (8 * 32 * made["num_warps"])  # eight weights each
            assert made["loads_before_multiplying"] >= blocks * loads, made
        assert made["l2_prefetches"] == (constants.get("L2_PREFETCH", 0) > 0 and pdl == PdlMode.WAIT_BEFORE_NEWEST), made
        if constants.get("FORMAT"):
            assert made["wide_reads_of_words"], made
            assert not made["spills"], made
        assert made["fp8_instructions"] == made["fp8_cache"], made
        if made["fp8_cache"]:
            assert not made["spills"], made
            assert not made["slow_conversions"] or made["kernel"] == "rotate_and_store", made
    fp8_caches = [(made["kernel"], made["constants"].get("SPLIT_K")) for made in compiled if made["fp8_cache"]]
    assert {name for name, _ in fp8_caches} == {"decode_attention", "rotate_and_store"}
    assert len(fp8_caches) >= 4, fp8_caches  # one token, a small batch, a large one, prompts
    assert {made["constants"].get("FORMAT") for made in compiled} == {None, 0, 1, 2}
    assert any(made["l2_prefetches"] for made in compiled)
    persistent = [made["constants"] for made in compiled if made["kernel"] == "persistent_norm_gemv"]
    early = (PdlMode.WAIT_AFTER_COMPUTE, PdlMode.WAIT_BEFORE_NEWEST)
    assert {(constants["PDL"], constants["PREFETCH_SECOND"]) for constants in persistent} == {
        (PdlMode.TRIGGER_THEN_WAIT, False), (PdlMode.WAIT_THEN_TRIGGER, False),
        *((mode, second) for mode in early for second in (False, True)),
    }  # fmt: skip
