"""Compiles every kernel of a decode step and of a prompt for sm_90, as the engine would launch it, and prints a JSON line per kernel. No
GPU is needed: Triton brings the assembler. A process of its own, because under TRITON_INTERPRET (the other kernel tests) nothing is
compiled."""

import json
import os
from functools import partial

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ladder_residual.core.config import Wiring
from ladder_residual.engine.cache import KVCache
from ladder_residual.engine.cuda.launcher import Launcher
from ladder_residual.engine.cuda.pdl import PdlMode
from ladder_residual.engine.cuda.streams import RecordingStreams
from ladder_residual.engine.executor import Executor
from ladder_residual.engine.kernels import elementwise, prefill
from ladder_residual.engine.kernels.quantized import dequantize
from ladder_residual.engine.ops import gemv as gemv_ops
from ladder_residual.engine.ops.gemm import GemmOps
from ladder_residual.engine.ops.gemv import GemvOps
from ladder_residual.engine.ops.small_batch import SmallBatchOps
from ladder_residual.engine.ops.tiles import GemvTiles, SmallBatchTiles
from ladder_residual.engine.quantized import FORMATS, QuantizedWeight
from ladder_residual.engine.reducers import EmulatedReducer, NoReducer
from ladder_residual.engine.schedule import plan_steps
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import random_weights, stack_weights
from ladder_residual.models.presets import ModelShape

HOPPER = GPUTarget("cuda", 90, 32)
KINDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
KINDS[torch.float8_e4m3fn] = "*fp8e4nv"
SHAPE = ModelShape(  # a rank of Llama-3-70B at tp=8, two layers of it
    family="llama", hidden_size=8192, intermediate_size=28672, num_layers=2, num_heads=64, num_kv_heads=8, head_dim=128,
    vocab_size=32768,
)  # fmt: skip
spec, sizes = EngineSpec.from_shape(SHAPE), RankSizes.of(SHAPE, 8, 0)
weights = stack_weights(spec, sizes, random_weights(spec, 8, 0, torch.bfloat16, "cpu"))  # never multiplied, but sized
gemv_ops.sm_count = lambda device: 132  # of an H200: how many persistent programs there are, and what each of them stores
gemv_ops.is_hopper = lambda device: True
seen = set()


class Compiling(Launcher):
    """Compiles a kernel where the engine would start it."""

    def __init__(self):
        super().__init__(PdlMode.TRIGGER_THEN_WAIT)

    def __call__(self, kernel, grid, *args, num_warps, max_registers=None, can_read_before_wait=False, **constants):
        compile_kernel(kernel, args, num_warps, {**constants, "PDL": int(self.take_mode(can_read_before_wait))}, max_registers)
        self.dependent = True


def compile_kernel(kernel, args, num_warps, constants, max_registers=None):
    names = [name for name in kernel.arg_names if name not in constants]
    constants = constants | {name: None for name, value in zip(names, args, strict=True) if value is None}
    args, names = [value for value in args if value is not None], [name for name in names if name not in constants]
    signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict(zip(names, map(kind_of, args), strict=True))
    key = (kernel.__name__, num_warps, max_registers, str(sorted(constants.items())), str(signature))
    if key in seen:
        return
    seen.add(key)
    # as Triton specialises a launch: pointers and sizes that 16 divides allow wide loads
    divisible = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, value in zip(names, args, strict=True)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
    }
    source = ASTSource(kernel, signature, constants, divisible)
    options = {"num_warps": num_warps, **({"maxnreg": max_registers} if max_registers else {})}
    made = triton.compile(source, target=HOPPER, options=options)
    ptx = made.asm["ptx"]
    line = {
        "kernel": kernel.__name__,
        "constants": constants,
        "num_warps": num_warps,
        "shared": made.metadata.shared,
        "waits": "griddepcontrol.wait" in ptx,
        "loads_past_l1": ptx.count("ld.global.cg"),
        "l2_prefetches": ptx.count("cp.async.bulk.prefetch.L2"),
        # of weights, in the order of the machine code
        "loads_before_multiplying": made.asm["sass"].partition("FFMA")[0].count("LDG.E.EF")
        if "persistent" in kernel.__name__
        else 0,
        "tensor_cores": "mma" in ptx,
        "spills": "STL" in made.asm["sass"],
        "wide_reads_of_words": "LDG.E.EF.128" in made.asm["sass"],
        "fp8_cache": "*fp8e4nv" in signature.values(),
        "fp8_instructions": "e4m3x2" in ptx,
        "slow_conversions": made.asm["sass"].count("F2F.BF16.F16"),  # a sixteenth of the rate of others
        "copies_ahead": "cp.async" in ptx,
        "copies_before_the_wait": made.asm["ttgir"].partition("griddepcontrol.wait")[0].count("ttg.async_copy_global_to_local"),
    }
    print(json.dumps(line), flush=True)


def kind_of(value):
    if isinstance(value, torch.Tensor):
        return KINDS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def compile_step(wiring, batch, ops_of, schedule, reducer=None, kv="auto"):
    cache = KVCache(spec, sizes, batch, 2048, torch.bfloat16, "cpu", kv)
    ops = ops_of(spec, sizes, weights, cache)
    ops.launchers = [Compiling(), Compiling()]
    ops.embed = lambda tokens, partial: compile_kernel(
        elementwise.embed, (tokens, weights.embedding, partial, 0, sizes.vocab_rows, sizes.hidden), 4, {"BLOCK": 1024}
    )
    plan = plan_steps(Wiring.parse(wiring, SHAPE.num_layers), schedule)
    executor = Executor(
        plan, ops, reducer or CompilingReducer(), RecordingStreams(), rows=batch, hidden=sizes.hidden, tp=8, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    logits = torch.empty(batch, sizes.vocab_rows, dtype=torch.bfloat16)
    executor.run(torch.zeros(batch, dtype=torch.int64), logits)


def quantized(weight, format, group, zero_points):
    """Of the weight's shape; its numbers do not matter."""
    (rows, columns), numbers = weight.shape, FORMATS[format].numbers
    scales = torch.empty(rows, columns // (group or columns), dtype=torch.bfloat16)
    words = torch.empty(rows, columns // numbers, dtype=torch.int32)
    return QuantizedWeight(format, words, scales, scales if zero_points else None, group or columns)


def compile_quantized(format, group, zero_points):
    """One token and several."""
    global weights
    plain = weights
    weights = plain.with_projections(lambda weight: quantized(weight, format, group, zero_points))
    for tiles in GemvTiles.quantized(sizes, 2048, format)[:2]:
        compile_step("ladder", 1, partial(GemvOps, tiles=tiles), "serial")
    for tiles in SmallBatchTiles.candidates(sizes):
        compile_step("ladder", 16, partial(SmallBatchOps, tiles=tiles), "serial")
    weight = weights.layers[0].down
    arguments = (weight.words, weight.scales, weight.zeros, plain.layers[0].down)
    compile_kernel(dequantize, arguments, 4, {"K": weight.shape[1], "BLOCK_K": 4096, **weight.constants})
    weights = plain


class CompilingReducer(EmulatedReducer):
    """An emulated all-reduce is a kernel too."""

    def __init__(self):
        pass

    def reduce(self, partial, reduced, channel, launch):
        arguments = (partial, reduced, partial.numel(), 24000)
        for block in (2048, 32768):  # of small messages and of large ones
            compile_kernel(elementwise.timed_copy, arguments, 8, {"BLOCK": block, "PDL": 1})


if __name__ == "__main__":
    for tiles in GemvTiles.candidates(sizes, 2048):
        ops = partial(GemvOps, tiles=tiles, reads_before_wait=True)
        compile_step("ladder", 1, ops, tiles.schedules[0])
        if "interleaved" in tiles.schedules:  # without a link gate/up waits for nothing before it reads
            compile_step("ladder", 1, ops, "interleaved", NoReducer())
    compile_step("desync-3x", 1, partial(GemvOps, tiles=GemvTiles.candidates(sizes, 2048)[0]), "serial")
    compile_step("parallel", 4, GemmOps, "serial")
    small_batch = [partial(SmallBatchOps, tiles=tiles) for tiles in SmallBatchTiles.candidates(sizes)]
    for ops in small_batch:
        compile_step("ladder", 4, ops, "two_stream")
    compile_step("desync-3x", 16, small_batch[0], "serial")
    compile_step("parallel", 4, small_batch[0], "serial")
    for format, group, zero_points in (("fp8", None, False), ("fp8", 128, False), ("int4", 128, False), ("int4", 32, True)):
        compile_quantized(format, group, zero_points)
    compile_step("ladder", 1, partial(GemvOps, tiles=GemvTiles.candidates(sizes, 2048)[0]), "serial", kv="fp8")
    compile_step("ladder", 4, small_batch[0], "serial", kv="fp8")
    compile_step("ladder", 17, GemmOps, "serial", kv="fp8")
    compile_kernel(elementwise.advance_positions, (torch.zeros(4, dtype=torch.int32), 4), 1, {"BLOCK": 4})
    qkv, norm = torch.empty(8, sizes.qkv_width, dtype=torch.bfloat16), torch.empty(sizes.head_dim, dtype=torch.bfloat16)
    heads = {"HEADS": sizes.heads, "HEADS_PAD": 8, "KV_HEADS": sizes.kv_heads, "KV_PAD": 1, "DIM": 128}
    for kv, held in (("auto", None), ("fp8", qkv)):
        cache = KVCache(spec, sizes, 2, 64, torch.bfloat16, "cpu", kv)
        arguments = (qkv, qkv, norm, norm, cache.cos, cache.sin, qkv, *cache.layer(0), held, held, 4, 64, 1e-5)
        compile_kernel(prefill.rotate_and_store, arguments, 4, {**heads, "BIAS": True, "HEAD_NORM": True})
    stream, hidden = torch.empty(8, sizes.hidden), torch.empty(8, sizes.hidden, dtype=torch.bfloat16)
    arguments = (stream, hidden, hidden, hidden, stream, hidden, hidden, 1e-5)
    constants = {"K": 8192, "BLOCK_K": 8192, "KEEP_STREAM": True, "NUM_ADDS": 1, "STORE_STREAM": True, "PDL": 0}
    compile_kernel(elementwise.add_rms_norm, arguments, 8, constants)
    compile_kernel(elementwise.silu_and_mul, (hidden, hidden, sizes.intermediate), 4, {"BLOCK": 1024, "PDL": 0})
