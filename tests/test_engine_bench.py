"""Links, sizes, peers: what the engine's benchmarks do that needs no GPU; ``test_engine_report.py`` has the page made of them."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ladder_residual.bench import gpu
from ladder_residual.bench.gpu import bench_decode, bench_e2e, bench_prefill, time_in_turns
from ladder_residual.bench.gpu_peers import Peers
from ladder_residual.bench.gpu_report import render
from ladder_residual.bench.peers_plain import PlainDecoder
from ladder_residual.bench.peers_transformers import transformers_model
from ladder_residual.config import Wiring
from ladder_residual.engine import reducers
from ladder_residual.engine.emulate import measured_links, parse_emulation, parse_link
from ladder_residual.engine.launcher import Launcher
from ladder_residual.engine.reference import ReferenceDecoder
from ladder_residual.engine.rope import rope_tables
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import random_weights, stack_weights
from ladder_residual.generate import with_engine
from ladder_residual.loading import load_model
from ladder_residual.parallel import World
from ladder_residual.presets import ModelShape, presets

ROOT = Path(__file__).parent.parent


def script(name: str) -> SimpleNamespace:
    """What a file of ``runs`` defines."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "runs" / f"{name}.py")))


class Counting:
    """An engine whose steps note who ran at which context."""

    def __init__(self, name: str, log: list[tuple[str, int]]) -> None:
        self.name, self.log, self.length = name, log, 0

    def reset(self, length: int, *, random_context: bool = False) -> None:
        self.length = length

    def replay(self) -> None:
        self.log.append((self.name, self.length))
        self.length += 1


def test_what_is_compared_is_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int]] = []
    first, second = Counting("first", log), Counting("second", log)

    def timed(step, repeats: int) -> list[float]:
        del log[-3:]  # what only warms up
        for _ in range(repeats):
            step()
        return [float(context) for _, context in log[len(log) - repeats :]]

    monkeypatch.setattr(gpu, "time_on_device", timed)
    taken = time_in_turns([first, second, first], context=100, repeats=7, turns=3)
    contexts = [97.0, 98.0, 99.0, 100.0, 101.0, 102.0, 103.0]
    assert taken == {id(first): contexts, id(second): contexts}
    assert [name for name, _ in log] == [*["first"] * 2, *["second"] * 2] * 2 + [*["first"] * 3, *["second"] * 3]


def test_fixed_and_linear_links() -> None:
    assert parse_link("24us").microseconds(16384) == 24
    assert parse_link("none").silent
    assert parse_link("alpha=10, beta=100").microseconds(1_000_000) == pytest.approx(10 + 10)
    assert not parse_link("alpha=0,beta=100").silent


def test_a_link_whose_sums_are_ordinary_kernels():
    link = parse_link(" 24us+launch")
    assert (link.name, link.early, link.microseconds(16384)) == ("24us+launch", False, 24)
    assert parse_link("24us").early
    measured = parse_link("h200-nccl+launch", tp=8)
    assert measured.microseconds(16384) == parse_link("h200-nccl", tp=8).microseconds(16384)
    assert measured.name == "h200_sxm-nccl+launch"
    with pytest.raises(ValueError, match="unknown link 'soon'"):
        parse_link("soon+launch")
    for text in ("none+launch", "24us+launch+launch"):
        with pytest.raises(ValueError, match=rf"link '{re.escape(text)}': \+launch stands once, behind a link that takes time"):
            parse_link(text)


@pytest.mark.parametrize(
    ("text", "hopper", "early"), [("24us", True, True), ("24us+launch", True, False), ("24us", False, False)]
)
def test_an_ordinary_sum_ties_neither_itself_nor_what_follows_to_its_neighbour(monkeypatch, text, hopper, early):
    started = []
    monkeypatch.setattr(reducers, "hopper", lambda device: hopper)

    class Noting(Launcher):
        def __call__(self, kernel, grid, *args, warps, **constants):
            started.append((self.pdl, self.dependent, self.carveout))
            self.dependent = True

    monkeypatch.setattr(reducers, "Launcher", Noting)
    lane = Noting(dependent=True, carveout=100)
    message = torch.zeros(1, 8192)
    reducers.EmulatedReducer(parse_link(text), message.device).reduce(message, message.clone(), 0, lane)
    assert started == [(1, True, 100) if early else (0, False, 100)]
    assert lane.dependent == early


def test_measured_links_interpolate_between_their_points() -> None:
    link = parse_link("h200_sxm-nccl", tp=8)
    points = dict(measured_links()["h200_sxm-nccl", 8])
    assert link.microseconds(16384) == points[16384]
    low, high = sorted((points[16384], points[32768]))
    assert low <= link.microseconds(24576) <= high
    assert link.microseconds(4 * max(points)) == pytest.approx(4 * points[max(points)])
    assert parse_link("h200-nccl") == link


@pytest.mark.parametrize(
    ("text", "message"), [("fast", "unknown link 'fast'"), ("24 ms", "unknown link"), ("alpha=1,beta=0", "must be above 0")]
)
def test_unknown_links(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_link(text)


def test_a_link_measured_on_other_numbers_of_gpus() -> None:
    with pytest.raises(ValueError, match=r"not measured on 3 GPUs, only on \[2, 4, 8\]"):
        parse_link("h200_sxm-nccl", tp=3)


def test_bytes_of_the_70b_shard() -> None:
    """17.4 GB a step, as counted by hand: 80 layers of QKV 1280x8192, output, gate/up 7168x8192, down, and 16032 rows of head."""
    sizes = RankSizes.of(ModelShape.from_name("llama-3-70b"), 8, 0)
    layer = 1280 * 8192 + 8192 * 1024 + 7168 * 8192 + 8192 * 3584 + 2 * 8192
    assert sizes.weight_bytes(2, tied=False) == 2 * (80 * layer + 16032 * 8192 + 8192)
    assert sizes.cache_bytes(2, 1, 1280) == 2 * 2 * 80 * 1280 * 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 80}, "head size 80 is not one of"),
        ({"family": "bloom"}, "not 'bloom'"),
        ({"num_heads": 7}, "7 heads do not divide into 8 KV heads"),
    ],
)
def test_models_the_engine_cannot_take(change: dict, message: str) -> None:
    shape = ModelShape(**{**ModelShape.from_name("llama-3.1-8b").to_dict(), **change})
    with pytest.raises(ValueError, match=message):
        EngineSpec.from_shape(shape)


def test_ranks_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="num_heads=32 does not divide into tp=3"):
        RankSizes.of(ModelShape.from_name("llama-3.1-8b"), 3, 0)
    assert RankSizes.of(ModelShape.from_name("llama-3.1-405b"), 16, 3).kv_heads == 1  # replicated


def test_rope_types() -> None:
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
              "vocab_size": 9, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}  # fmt: skip
    with pytest.raises(ValueError, match="rope type 'yarn'"):
        EngineSpec.from_hf(config)
    with pytest.raises(ValueError, match="sliding_window=4096"):
        EngineSpec.from_hf({**config, "rope_scaling": None, "sliding_window": 4096})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_tables_are_those_of_transformers(rope) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=9, rope_parameters=rope,
        max_position_embeddings=512,
    )  # fmt: skip
    cos, sin = rope_tables(EngineSpec.from_hf(config.to_dict()), 300, "cpu")
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(300)[None])
    torch.testing.assert_close(cos, expected[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sin, expected[1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("ends", "worst"), [(2, 3.0), ([2, 0], 0.0)])
def test_the_judge_of_tokens_may_not_end_a_text_either(ends, worst) -> None:
    """After one word of prompt the second token, 1, was chosen; without its end tokens the judge would choose 0 or the same."""

    class Judge:
        generation_config = SimpleNamespace(eos_token_id=ends)

        def __call__(self, input_ids, **_):
            return SimpleNamespace(logits=torch.tensor([4.0, 1.0, 9.0]).repeat(*input_ids.shape, 1))

    sequences = torch.tensor([[0, 1], [0, 1]])
    found = script("engine_real_checkpoint").regret(Judge(), sequences, torch.ones_like(sequences), 1)
    assert found.tolist() == [[worst], [worst]]


def test_the_control_of_tokens_compares_transformers_with_itself(demo_dir, tmp_path, monkeypatch) -> None:
    command = ["engine_real_checkpoint.py", str(demo_dir), "--control", "--wirings", "ladder", "--dtypes", "float32"]
    monkeypatch.setattr("sys.argv", [*command, "--at-once", "3", "--out", str(tmp_path)])
    script("engine_real_checkpoint").main()
    (file,) = tmp_path.glob("*-batch3-control.json")
    result = json.loads(file.read_text())
    (row,) = result["rows"]
    assert (row["tokens"], row["equal_tokens"]) == (384, 384)
    assert row["eager_float32_agrees"] == row["torch_float32_agrees"] == 1
    assert "no engine" in result["control"]


def test_models_named_in_runs_exist() -> None:
    for name, tp in script("engine_sizes").MODELS:
        RankSizes.of(presets()[name], tp, tp - 1)
        EngineSpec.from_shape(presets()[name])


@pytest.mark.parametrize(
    ("text", "tp", "microseconds"),
    [("tp=8,link=24us", 8, 24.0), ("tp=4, link=h200-nccl", 4, None), ("tp=16,alpha=10,beta=100", 16, 10 + 16384e-5)],
)
def test_an_emulated_rank_is_said_in_one_option(text, tp, microseconds):
    found = parse_emulation(text)
    assert found.tp == tp
    assert found.link.microseconds(16384) == (microseconds or parse_link("h200-nccl", tp=4).microseconds(16384))
    assert str(found).startswith(f"emulated rank of tp={tp}, link ")


@pytest.mark.parametrize(
    "text", ["", "tp=8", "link=24us", "tp=1,link=24us", "tp=x,link=24us", "tp=8,link=24us,speed=2", "tp=8,link=slow"]
)
def test_a_bad_emulation_names_itself(text):
    with pytest.raises(ValueError, match=r"cannot emulate|unknown link"):
        parse_emulation(text)


def test_an_emulated_rank_holds_the_first_shard(demo_dir):
    """What `generate --emulate` hands to the engine: rank 0's weights, with nobody else there."""
    shard, whole = load_model(demo_dir, World(size=2, emulated=True)), load_model(demo_dir)
    parts, all_of = dict(shard.named_parameters()), dict(whole.named_parameters())
    for name, rows in (("model.layers.1.mlp.gate_proj.weight", 0), ("model.layers.1.self_attn.o_proj.weight", 1)):
        torch.testing.assert_close(parts[name], all_of[name].chunk(2, dim=rows)[0])
    with pytest.raises(ValueError, match="--emulate needs the CUDA engine and a GPU"):
        with_engine(
            shard, World(size=2, emulated=True), "auto", batch=1, context=64, beams=1, schedule="auto", link=parse_link("24us")
        )


PEER_SHAPE = ModelShape(
    family="llama", hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=97
)  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
def test_the_plain_peer_computes_what_the_slow_twin_does(tp: int) -> None:
    """A peer that computed something else would be no peer. With tp=2: rank 1 alone, whose sums are its own."""
    spec, sizes = EngineSpec.from_shape(PEER_SHAPE), RankSizes.of(PEER_SHAPE, tp, tp - 1)
    weights = stack_weights(spec, sizes, random_weights(spec, tp, tp - 1, torch.float32, "cpu"))
    sums: list[int] = []
    alone = None if tp == 1 else lambda partial: sums.append(1) or partial.clone()
    peer = PlainDecoder(spec, sizes, weights, batch=3, max_context=8, sums=alone)
    reference = ReferenceDecoder(spec, Wiring.parse("standard", 3), [weights], tp=tp, first_rank=tp - 1)
    for tokens in torch.randint(0, 97, (5, 3), generator=torch.Generator().manual_seed(4)):
        torch.testing.assert_close(peer.step(tokens), reference.forward(tokens[:, None])[:, 0], rtol=1e-4, atol=1e-5)
    assert len(sums) == (0 if tp == 1 else 5 * (1 + 2 * 3))
    prompts = torch.randint(0, 97, (3, 4), generator=torch.Generator().manual_seed(5))
    reference = ReferenceDecoder(spec, Wiring.parse("standard", 3), [weights], tp=tp, first_rank=tp - 1)
    torch.testing.assert_close(peer.prompt(prompts), reference.forward(prompts)[:, -1], rtol=1e-4, atol=1e-5)
    for tokens in torch.randint(
        0, 97, (3, 3), generator=torch.Generator().manual_seed(6)
    ):  # over what the first text left behind
        torch.testing.assert_close(peer.step(tokens), reference.forward(tokens[:, None])[:, 0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="not that of qwen3"):
        PlainDecoder(EngineSpec.from_shape(replace(PEER_SHAPE, family="qwen3")), sizes, weights, batch=1, max_context=8)


@pytest.mark.parametrize(
    ("run", "changes", "message"),
    [
        (bench_decode, {"links": ("none", "bogus")}, "unknown link 'bogus'"),
        (bench_decode, {"batches": (1, 512)}, "batch 512 is outside"),
        (bench_decode, {"products": "mkl"}, "unknown products 'mkl'"),
        (bench_prefill, {"wirings": ("standard", "ladder:99")}, "layer 99"),
        (bench_e2e, {"links": ("24us", "24 parsecs")}, "unknown link"),
    ],
)
def test_a_mistake_in_the_last_case_costs_no_measurement(run, changes: dict, message: str) -> None:
    """Refused before weights are made, which would fail here for another reason: there is no GPU."""
    with pytest.raises(ValueError, match=message):
        run(model="llama-3-70b", tp=8, layers=80, **changes)


@pytest.mark.parametrize(
    ("change", "context", "message"),
    [
        ({"hidden_act": "gelu"}, 64, "hidden_act='gelu': the CUDA engine computes silu"),
        ({"sliding_window": 4096}, 4097, "takes at most 4096 tokens, not 4097"),
        ({"sliding_window": 4096}, None, "takes at most 4096 tokens"),
        ({"sliding_window": 4096}, 4096, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, 9000, None),
    ],
)
def test_what_a_config_asks_for_is_computed_or_refused(change: dict, context: int | None, message: str | None) -> None:
    config = {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 64,
              "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96, **change}  # fmt: skip
    if message is None:
        assert EngineSpec.from_hf(config, max_context=context).shape.num_layers == 2
        return
    with pytest.raises(ValueError, match=message):
        EngineSpec.from_hf(config, max_context=context)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_is_compared_with_the_same_weights(tied: bool) -> None:
    shape = replace(PEER_SHAPE, tied_embeddings=tied)
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}  # fmt: skip
    spec, sizes = EngineSpec.from_shape(shape, rope_scaling=scaled), RankSizes.of(shape, 1, 0)
    weights = stack_weights(spec, sizes, random_weights(spec, 1, 0, torch.float32, "cpu"))
    model = transformers_model(spec, weights)
    reference = ReferenceDecoder(spec, Wiring.parse("standard", 3), [weights], tp=1)
    tokens = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, reference.forward(tokens), rtol=1e-4, atol=1e-5)
    own = {tensor.data_ptr() for tensor in (weights.embedding, weights.layers[1].qkv, weights.layers[2].gate_up)}
    assert own <= {parameter.data_ptr() for parameter in model.parameters()}  # views, not copies
    with pytest.raises(ValueError, match="not on qwen2"):
        transformers_model(EngineSpec.from_shape(replace(shape, family="qwen2")), weights)


def test_peers_stand_beside_our_rows_and_their_failures_are_told() -> None:
    peers = Peers(SimpleNamespace(tp=1))

    def fails() -> dict:
        raise RuntimeError("no compiler")

    peers._try("transformers", lambda: {"batch": 1, "link": "none", "engine": "transformers", "ms": 30.0})
    peers._try("transformers", fails)
    peers._try("transformers", fails)
    found = peers.compared([{"batch": 1, "link": "none", "wiring": "standard", "ms": 20.0}], "ms")
    assert found["peers"][0]["over_ours"] == 1.5
    assert found["notes"] == ["transformers did not run: RuntimeError: no compiler"]
    shared = Peers(SimpleNamespace(tp=8))
    shared.e2e("24us", batch=1, prompt=8, new=8, repeats=1)  # no shard here, so the compiled blocks do not run
    assert not shared.rows
    assert [note.split(":")[0] for note in shared.notes] == [
        "compiled blocks in one CUDA graph did not run",
        "transformers does not run as one emulated rank of several",
    ]
    page = render(
        [{"benchmark": "prefill", "model": "m", "tp": 1, "rows": [{"batch": 1, "wiring": "standard", "ms": 20.0}], **found}]
    )
    assert "What a user would have otherwise" in page
    assert "| 1 | none | transformers | 30.000 | 1.500 |" in page
