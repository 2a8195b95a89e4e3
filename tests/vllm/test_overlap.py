"""Which all-reduces run beside the modules: the rule, without a card."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder_residual.core.reduce import CompletedWork, Reducer, ReduceWork
from ladder_residual.vllm_plugin.communicator import ChoosingReducer, SideStreamReducer
from ladder_residual.vllm_plugin.overlap import (
    ALWAYS,
    MODULES,
    NEVER,
    VARIABLE,
    Overlap,
    Times,
    asked,
    decide,
    module_bytes,
    modules,
    token_counts,
)
from ladder_residual.vllm_plugin.versions import graphs_for_decode_only, note_in_compile_cache, second_nccl


def test_it_pays_where_the_mean_over_ranks_is_shorter() -> None:
    """In line and overlapped milliseconds by number of tokens; a gain within the noise is none."""
    first = {1: Times(1.0, 1.2), 4: Times(2.0, 1.99), 16: Times(5.0, 3.0)}
    second = {1: Times(1.0, 0.9), 4: Times(2.0, 1.99), 16: Times(5.0, 4.0)}
    overlap = decide([first, second])
    assert overlap.pays == ((1, False), (4, False), (16, True))
    assert overlap == decide([second, first])  # the same on every rank
    assert [overlap.of(tokens) for tokens in (1, 3, 15, 16, 17, 9999)] == [False, False, False, True, True, True]
    assert overlap.anywhere
    assert "16" in str(overlap)


def test_beside_a_fused_kernel_it_is_all_batches_or_none() -> None:
    """A layer that overlaps for some batches has no fused all-reduce and norm for the others."""
    some = {1: Times(1.0, 1.2), 16: Times(5.0, 3.0)}
    assert decide([some], fused=True) == NEVER
    assert decide([{16: some[16]}], fused=True).pays == ((16, True),)


@pytest.mark.parametrize(
    ("without", "leave"),
    [
        ({16: 5.0, 256: 9.0}, False),  # small prompts lose what large ones gain
        ({16: 2.1, 256: 9.4}, False),  # a gain the launches of a whole layer would take back
        ({16: 2.5, 256: 7.0}, True),
    ],
)
def test_prompts_leave_their_graphs_only_for_a_clear_gain(without: dict[int, float], leave: bool) -> None:
    """As over IPC: beside the modules pays in a graph, and prompts stay in theirs all the same."""
    times = {1: Times(1.0, 0.5, beside_without_graph=0.1)}  # no prompt
    times |= {tokens: Times(in_line, 0.9 * in_line, True, without[tokens]) for tokens, in_line in ((16, 2.0), (256, 10.0))}
    overlap = decide([times, times])
    assert overlap.without_graphs == leave
    assert overlap.pays == ((1, True), (16, True), (256, True))


def test_longer_prompts_need_a_clear_gain_too() -> None:
    """They have no graphs anyway."""
    times = {64: Times(1.0, 0.95), 256: Times(4.0, 3.8, graph=False), 1024: Times(16.0, 12.0, graph=False)}
    overlap = decide([times])
    assert overlap.pays == ((64, True), (256, False), (1024, True))
    assert not overlap.without_graphs


@pytest.mark.parametrize("fused", [False, True])
def test_both_ways_compute_the_same_and_in_line_adds_no_kernel(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """The modules that are timed, on Triton's interpreter. In line: per module two products, an all-reduce and one kernel, which is none
    where vLLM's all-reduce norms as well."""
    from lab.triton_interpreter import mend_interpreter
    from ladder_residual.engine.kernels import join

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as when the kernels were defined (conftest.py)
    mend_interpreter()
    joins: list[int] = []
    kernel = join.norm_after_joining
    monkeypatch.setattr(join, "norm_after_joining", lambda *given: (joins.append(len(given[1])), kernel(*given))[1])
    generator = torch.Generator().manual_seed(0)
    x, up, down = (0.3 * torch.randn(shape, generator=generator) for shape in ((3, 16), (16, 32), (32, 16)))
    outputs = []
    for name in ("in line", "beside"):
        names: list[str] = []
        outputs.append(modules(x, up, down, torch.ones(16), Named(names, name), fused=fused))
        assert names == [name] * MODULES
    torch.testing.assert_close(*outputs)
    assert joins == ([] if fused else [0, *[1] * (MODULES - 1)] * 2)


def test_always_and_never_hold_for_every_batch() -> None:
    for tokens in (1, 64, 8192):
        assert ALWAYS.of(tokens)
        assert not NEVER.of(tokens)
    assert ALWAYS.anywhere
    assert not NEVER.anywhere
    assert str(ALWAYS) != str(NEVER)


def test_counts_reach_the_largest_batch() -> None:
    assert token_counts(1) == [1]
    assert token_counts(8192) == [1, 4, 16, 64, 256, 1024, 4096]


def test_a_rank_reads_its_share_of_a_module() -> None:
    config = SimpleNamespace(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    both = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336  # q and o, k and v, and the MLP
    assert module_bytes(config, 2, 2) == both // 2
    assert module_bytes(config, 2, 1) == both // 4


class Named(Reducer):
    def __init__(self, names: list[str], name: str) -> None:
        self.names, self.name = names, name

    def launch(self, partial: Tensor) -> ReduceWork:
        self.names.append(self.name)
        return CompletedWork(partial)


def test_each_batch_takes_its_way() -> None:
    names: list[str] = []
    reducer = ChoosingReducer(Named(names, "in line"), Named(names, "beside"), Overlap(((1, False), (16, True))))
    for tokens in (1, 15, 16, 300):
        reducer.launch(torch.zeros(tokens, 8)).wait()
    assert names == ["in line", "in line", "beside", "beside"]


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert asked() == "auto"
    monkeypatch.setenv(VARIABLE, "never")
    assert asked() == "never"
    monkeypatch.setenv(VARIABLE, "sometimes")
    with pytest.raises(ValueError, match="VLLM_LADDER_OVERLAP is 'sometimes'; choose from auto, always, never"):
        asked()


def test_the_choice_is_part_of_the_compile_cache() -> None:
    from vllm.config import VllmConfig

    def hashed(value: Any) -> str:
        config = VllmConfig()
        note_in_compile_cache(config, "ladder_overlap", value)
        return config.compute_hash()

    assert hashed(True) == hashed(True)
    assert hashed(True) != hashed(False)


class Nccl:
    """As vLLM's communicator: made from a group and a device, it reduces tensors."""

    disabled = False

    def __init__(self, group: Any = None, device: Any = None) -> None:
        self.made_from = group, device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return 2 * tensor


@pytest.mark.parametrize(
    ("others", "is_there"),
    [
        ({}, True),
        ({"ca_comm": SimpleNamespace(disabled=True), "symm_mem_comm": None}, True),
        ({"ca_comm": SimpleNamespace(disabled=False)}, False),
        ({"fi_ar_comm": SimpleNamespace()}, False),
        ({"fi_pcie_ipc_ar_comm": SimpleNamespace(disabled=False)}, False),
        ({"pynccl_comm": None}, False),
    ],
)
def test_a_second_communicator_only_where_nccl_reduces_everything(others: dict[str, Any], is_there: bool) -> None:
    """vLLM's other all-reduces serve one at a time."""
    device = SimpleNamespace(**({"pynccl_comm": Nccl()} | others))
    all_reduce = second_nccl(SimpleNamespace(device_communicator=device, cpu_group="gloo", device="cuda:0"))
    assert (all_reduce is not None) == is_there
    if all_reduce is not None:
        assert all_reduce.__self__.made_from == ("gloo", "cuda:0")  # type: ignore[attr-defined]


def test_two_communicators_take_turns() -> None:
    names: list[str] = []
    reducer = object.__new__(SideStreamReducer)
    reducer.streams = deque([Named(names, "vLLM's"), Named(names, "second")])  # type: ignore[arg-type]
    for _ in range(4):
        reducer.launch(torch.zeros(1, 8)).wait()
    assert names == ["vLLM's", "second"] * 2


@pytest.mark.parametrize(
    ("before", "after"), [("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"), ("PIECEWISE", "PIECEWISE"), ("NONE", "NONE")]
)
def test_prompts_leave_piecewise_graphs(before: str, after: str) -> None:
    from vllm.config import CompilationConfig, CUDAGraphMode

    compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode[before])
    graphs_for_decode_only(SimpleNamespace(compilation_config=compilation))
    assert compilation.cudagraph_mode == CUDAGraphMode[after]
