"""Compiles every kernel of a decode step and of a prompt for sm_90, as the engine would launch it, and prints a JSON line per kernel. No
GPU is needed: Triton brings the assembler. A process of its own, because under TRITON_INTERPRET (the other kernel tests) nothing is
compiled."""

import json
import os

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ladder_residual.config import Wiring
from ladder_residual.engine import gemv_ops, kernels_prompt, kernels_small
from ladder_residual.engine.cache import KVCache
from ladder_residual.engine.execute import Executor
from ladder_residual.engine.gemm_ops import GemmOps
from ladder_residual.engine.gemv_ops import GemvOps, GemvTiles
from ladder_residual.engine.launcher import Launcher
from ladder_residual.engine.reducers import EmulatedReducer, NoReducer
from ladder_residual.engine.row_ops import RowOps, RowTiles
from ladder_residual.engine.schedule import plan_steps
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.streams import RecordingStreams
from ladder_residual.engine.weights import random_weights, stack_weights
from ladder_residual.presets import ModelShape

HOPPER = GPUTarget("cuda", 90, 32)
KINDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
SHAPE = ModelShape(  # a rank of Llama-3-70B at tp=8, two layers of it
    family="llama", hidden_size=8192, intermediate_size=28672, num_layers=2, num_heads=64, num_kv_heads=8, head_dim=128,
    vocab_size=32768,
)  # fmt: skip
spec, sizes = EngineSpec.from_shape(SHAPE), RankSizes.of(SHAPE, 8, 0)
weights = stack_weights(spec, sizes, random_weights(spec, 8, 0, torch.bfloat16, "cpu"))  # never multiplied, but sized
gemv_ops.multiprocessors = lambda device: 132  # of an H200: how many programs walk, and what each of them stores
gemv_ops.hopper = lambda device: True
seen = set()


class Compiling(Launcher):
    """Compiles a kernel where the engine would start it."""

    def __init__(self):
        super().__init__(pdl=1)

    def __call__(self, kernel, grid, *args, warps, registers=None, reads_before=False, **constants):
        compile_kernel(kernel, args, warps, {**constants, "PDL": self.waits(reads_before)}, registers)
        self.dependent = True


def compile_kernel(kernel, args, warps, constants, registers=None):
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict(zip(names, map(kind_of, args), strict=True))
    key = (kernel.__name__, warps, registers, str(sorted(constants.items())), str(signature))
    if key in seen:
        return
    seen.add(key)
    # what Triton finds out of the arguments at a launch: pointers and sizes that 16 divides are loaded in wide pieces
    wide = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, value in zip(names, args, strict=True)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
    }
    source = ASTSource(kernel, signature, constants, wide)
    made = triton.compile(source, target=HOPPER, options={"num_warps": warps, **({"maxnreg": registers} if registers else {})})
    ptx = made.asm["ptx"]
    line = {
        "kernel": kernel.__name__,
        "constants": constants,
        "warps": warps,
        "shared": made.metadata.shared,
        "early": "griddepcontrol.wait" in ptx,
        "past_l1": ptx.count("ld.global.cg"),
        "into_l2": ptx.count("cp.async.bulk.prefetch.L2"),
        # of weights, in the order of the machine code
        "loads_before_products": made.asm["sass"].partition("FFMA")[0].count("LDG.E.EF") if "walk" in kernel.__name__ else 0,
        "tensor_cores": "mma" in ptx,
        "copies_ahead": "cp.async" in ptx,
        "copies_before_the_wait": made.asm["ttgir"].partition("griddepcontrol.wait")[0].count("ttg.async_copy_global_to_local"),
    }
    print(json.dumps(line), flush=True)


def kind_of(value):
    if isinstance(value, torch.Tensor):
        return KINDS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def compile_step(wiring, batch, ops_of, schedule, sums=None):
    cache = KVCache(spec, sizes, batch, 2048, torch.bfloat16, "cpu")
    ops = ops_of(spec, sizes, weights, cache)
    ops.launchers = [Compiling(), Compiling()]
    ops.embed = lambda tokens, message: compile_kernel(
        kernels_small.embed, (tokens, weights.embedding, message, 0, sizes.vocab_rows, sizes.hidden), 4, {"BLOCK": 1024}
    )
    plan = plan_steps(Wiring.parse(wiring, SHAPE.num_layers), schedule)
    executor = Executor(
        plan, ops, sums or NoSum(), RecordingStreams(), rows=batch, hidden=sizes.hidden, tp=8, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    logits = torch.empty(batch, sizes.vocab_rows, dtype=torch.bfloat16)
    executor.run(torch.zeros(batch, dtype=torch.int64), logits)


class NoSum(EmulatedReducer):
    """The stand-in for a sum is a kernel too."""

    def __init__(self):
        pass

    def reduce(self, message, total, lane, launch):
        arguments = (message, total, message.numel(), 24000)
        for piece in (2048, 32768):  # of small messages and of large ones
            compile_kernel(kernels_small.copy_that_lasts, arguments, 8, {"BLOCK": piece, "PDL": 1})


if __name__ == "__main__":
    for tiles in GemvTiles.candidates(sizes, 2048):
        compile_step("ladder", 1, lambda *a, tiles=tiles: GemvOps(*a, tiles, reads_before=True), tiles.schedules[0])
        if "woven" in tiles.schedules:  # without a link gate/up waits for nothing before it reads
            compile_step("ladder", 1, lambda *a, tiles=tiles: GemvOps(*a, tiles, reads_before=True), "woven", NoReducer())
    compile_step("desync-3x", 1, lambda *a: GemvOps(*a, GemvTiles.candidates(sizes, 2048)[0]), "one")
    compile_step("parallel", 4, GemmOps, "one")
    for rows in RowTiles.candidates(sizes):
        compile_step("ladder", 4, lambda *a, rows=rows: RowOps(*a, rows), "two")
    compile_step("desync-3x", 16, lambda *a: RowOps(*a, RowTiles.candidates(sizes)[0]), "one")
    compile_step("parallel", 4, lambda *a: RowOps(*a, RowTiles.candidates(sizes)[0]), "one")
    compile_kernel(kernels_small.step_positions, (torch.zeros(4, dtype=torch.int32), 4), 1, {"BLOCK": 4})
    qkv, norm = torch.empty(8, sizes.qkv_width, dtype=torch.bfloat16), torch.empty(sizes.head_dim, dtype=torch.bfloat16)
    cache = KVCache(spec, sizes, 2, 64, torch.bfloat16, "cpu")
    arguments = (qkv, qkv, norm, norm, cache.cos, cache.sin, qkv, cache.keys[0], cache.values[0], 4, 64, 1e-5)
    constants = {
        "HEADS": sizes.heads,
        "HEADS_PAD": 8,
        "KV_HEADS": sizes.kv_heads,
        "KV_PAD": 1,
        "DIM": 128,
        "BIAS": True,
        "HEAD_NORM": True,
    }
    compile_kernel(kernels_prompt.rotate_and_store, arguments, 4, constants)
    stream, message = torch.empty(8, sizes.hidden), torch.empty(8, sizes.hidden, dtype=torch.bfloat16)
    arguments = (stream, message, message, message, stream, message, message, 1e-5)
    compile_kernel(
        kernels_small.absorb_norm,
        arguments,
        8,
        {"K": 8192, "BLOCK_K": 8192, "KEEP": True, "DELTAS": 1, "STORES": True, "PDL": 0},
    )
    compile_kernel(kernels_small.silu_multiply, (message, message, sizes.intermediate), 4, {"BLOCK": 1024, "PDL": 0})
