"""Costs, rows, advice, and where a model's shape comes from."""

import json
from dataclasses import replace

import pytest

from ladder_residual.distributed.world import World
from ladder_residual.models.presets import Experts, ModelShape, presets
from ladder_residual.models.random_weights import random_model
from ladder_residual.plan import hybrid_curve, plan
from ladder_residual.plan.cost import DTYPE_BYTES, Phase, RankCost, RankShape, engine, engines
from ladder_residual.plan.hardware import shipped
from ladder_residual.plan.models import resolve_model
from ladder_residual.plan.planner import TWO_STREAM, make_cases
from ladder_residual.train.recipe import Model
from tests.models.quantization import written

LLAMA_70B = presets()["llama-3-70b"]
DECODE = Phase(batch=1, tokens=1, context=1280)


def rank(model=LLAMA_70B, tp=8, device="h200", name="fused") -> RankCost:
    return RankCost(RankShape(model, tp), shipped().device(device), engine(name))


def one_case(**asked):
    defaults = {"device": "h100", "tp": [8], "link": ["nccl"], "batch": [1], "prompt": 1024, "new": 512}
    [(_, case)] = make_cases(asked.pop("model", "llama-3-70b"), **{**defaults, **asked})
    return case


def test_a_rank_of_70b_reads_what_was_weighed():
    """17.4 GB in bf16 at TP 8, the number that the emulated rank of this shape holds on a real card."""
    shape = RankShape(LLAMA_70B, 8)
    layers = LLAMA_70B.num_layers * (shape.attention_parameters + shape.mlp_parameters)
    head = LLAMA_70B.vocab_size * LLAMA_70B.hidden_size / 8
    assert DTYPE_BYTES * (layers + head) / 1e9 == pytest.approx(17.4, abs=0.1)


def test_a_decode_step_is_bound_by_memory_and_a_prefill_by_flops():
    cost = rank()
    assert cost.mlp(DECODE).flop_us == 0
    assert cost.mlp(Phase(batch=8, tokens=2048, context=2048)).memory_us == 0
    floor = 17.4e9 / 4.61e6  # microseconds at the measured read bandwidth
    work = cost.head(DECODE)
    for _ in range(80):
        work = work.plus(cost.attention(DECODE)).plus(cost.mlp(DECODE))
    assert work.memory_us == pytest.approx(floor, rel=0.03)


def test_attention_grows_with_context_and_batch_and_the_mlp_does_not_grow_with_context():
    cost = rank()
    longer = DECODE._replace(context=100_000)
    extra = (100_000 - 1280) * 2 * 128 * DTYPE_BYTES  # keys and values of one KV head
    bandwidth = 4.61e6  # bytes per microsecond, as measured
    assert cost.attention(longer).us - cost.attention(DECODE).us == pytest.approx(extra / bandwidth, rel=0.01)
    assert cost.mlp(longer) == cost.mlp(DECODE)
    expanded = RankCost(cost.shape, cost.device, replace(cost.engine, kv_reads_per_head=True))
    grown = expanded.attention(longer).us - expanded.attention(DECODE).us
    assert grown == pytest.approx(8 * extra / bandwidth, rel=0.01)  # 8 query heads share one KV head


def test_kv_heads_are_replicated_when_there_are_more_ranks():
    assert RankShape(LLAMA_70B, 16).kv_heads == 1
    assert RankShape(LLAMA_70B, 16).attention_parameters > RankShape(LLAMA_70B, 8).attention_parameters / 2


def test_memory_of_a_rank_counts_weights_cache_and_an_unsharded_head():
    sharded = rank().memory_bytes(1, 1024, 512)
    assert sharded["weights"] / 1e9 == pytest.approx(17.6, abs=0.1)
    assert sharded["kv_cache"] == 80 * 1536 * 2 * 128 * DTYPE_BYTES
    assert rank(name="paper").memory_bytes(1, 1024, 512)["weights"] - sharded["weights"] == pytest.approx(
        DTYPE_BYTES * 2 * 128256 * 8192 * 7 / 8
    )


@pytest.mark.parametrize(
    ("model", "tp", "says"),
    [
        (
            "llama-3-70b",
            7,
            "tp=7 does not divide 64 query heads with 8 KV heads evenly: use tp in \\[1, 2, 4, 8, 16, 32, 64\\]",
        ),
        ("ladder-3b", 8, "tp=8 does not divide 36 query heads"),
        ("llama-3-70b", 0, "at least 1"),
    ],
)
def test_tp_that_does_not_divide_is_refused_with_the_numbers(model, tp, says):
    with pytest.raises(ValueError, match=says):
        RankShape(presets()[model], tp)


def test_rows_come_for_every_combination_and_hold_the_bounds():
    rows = plan("llama-3-70b", device="h100", tp=[4, 8], link=["nccl", "one-shot"], batch=[1, 16])
    assert [(r.tp, r.link, r.batch) for r in rows] == [(t, n, b) for t in (4, 8) for n in ("nccl", "one-shot") for b in (1, 16)]
    for row in rows:
        assert row.speedup["standard"] == 1
        assert 1 < row.speedup["ladder:last-half"] < row.speedup["ladder"] < row.speedup["no-comm"]
        assert sum(row.limits.values()) == pytest.approx(100)
        # The collectives at the edges of a sharded vocabulary stay in every wiring, so not all of it can be hidden.
        assert row.hidden_percent["ladder"] > 90
        assert row.hidden_percent["standard"] == pytest.approx(0, abs=1e-6)
        assert json.loads(json.dumps(row.to_dict()))["memory_total_gb"] == pytest.approx(row.memory_total_gb)


def test_more_communication_means_more_gain_until_the_link_rules():
    gains = [
        plan("llama-3-70b", device="h100", tp=[8], link=[name])[0].speedup["ladder"]
        for name in ("one-shot", "nccl", "nccl-no-p2p")
    ]
    assert gains == sorted(gains)
    slow = plan("llama-3.1-8b", device="rtx-4090", tp=[4], link=["1gbe"], engine="paper")[0]
    assert slow.speedup["ladder"] < 1.2  # one communicator
    assert slow.limited_by == "all-reduce"


def test_one_rank_sends_nothing():
    [row] = plan("llama-3.1-8b", device="h100", tp=[1])
    assert row.allreduce_us == 0
    assert row.speedup["ladder"] == pytest.approx(1.0)
    assert row.speedup[TWO_STREAM] > 1.01


def test_a_model_that_does_not_fit_is_an_error_with_the_numbers_and_a_row_that_does_not_fit_is_marked():
    with pytest.raises(ValueError, match=r"does not fit: a rank of tp=1 with batch 1 needs 14\d GB .* h100 has 80 GB"):
        plan("llama-3-70b", device="h100", tp=[1])
    rows = plan("llama-3-70b", device="h100", tp=[1, 8])
    assert [row.fits for row in rows] == [False, True]


def test_hybrid_curve_rises_from_one_to_the_full_ladder():
    case = one_case()
    curve = hybrid_curve(case)
    assert curve[0] == (0, 1.0)
    assert curve[-1][0] == 80
    assert curve[-1][1] == pytest.approx(case.tokens_per_second("ladder") / case.tokens_per_second("standard"))
    assert [gain for _, gain in curve] == sorted(gain for _, gain in curve)


def test_advice_says_convert_or_not_with_the_gains():
    def sentence(**asked):
        [row] = plan("llama-3-70b", **asked)
        return row.advice

    assert sentence(link=["nccl"]).startswith("Convert llama-3-70b (tp 8, nccl, batch 1): ladder on all 80 layers gives 1.")
    assert ", on the last 40 layers 1." in sentence(link=["nccl"])
    few = sentence(link="one-shot", tp=4, engine="compiled")
    assert few.startswith("Do not convert llama-3-70b (tp 4, one-shot, batch 1): ladder gives only 1.0")
    assert "too little compute to hide them; fewer ranks" in sentence(link="1gbe", engine="paper")
    assert "% of the communication is hidden" in sentence(link=["20gbe"])


def test_engines_have_their_sources_and_unknown_ones_near_matches():
    assert all(profile.source for profile in engines().values())
    with pytest.raises(ValueError, match="did you mean 'fused'"):
        engine("fussed")
    with pytest.raises(ValueError, match="no two-stream schedule"):
        one_case(engine_name="paper").timeline(TWO_STREAM, DECODE)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="batch must be at least 1 and at most 1,000,000,000, got 0"):
        plan("llama-3-70b", batch=[0])
    with pytest.raises(ValueError, match="prompt must be at least 1"):
        plan("llama-3-70b", prompt=0)
    with pytest.raises(ValueError, match="at least one tp"):
        plan("llama-3-70b", tp=[])


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def test_a_directory_or_a_config_file_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for source in (tmp_path, tmp_path / "config.json"):
        _, shape = resolve_model(str(source))
        assert (shape.num_layers, shape.head_dim, shape.num_kv_heads) == (4, 16, 2)
    assert plan(str(tmp_path), tp=[2])[0].model == tmp_path.name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_experts": 64}, "num_experts says this is a mixture of experts, whose sizes are not there; the planner reads"),
        ({"n_routed_experts": 64}, "n_routed_experts says this is a mixture"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step=2 puts dense layers between"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers says this is a mixture with dense layers between"),
        (QWEN3_MOE | {"num_experts_per_tok": 9}, "a token cannot take 9 of 8"),
        (QWEN3_MOE | {"moe_intermediate_size": "big"}, "experts: size must be a positive whole number, got 'big'"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_hidden_layers": 0}, "num_layers must be a positive whole number, got 0"),
        ({"vocab_size": "many"}, "vocab_size must be a positive whole number"),
    ],
)
def test_configs_that_cannot_be_planned_say_why(tmp_path, change, says):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ValueError, match=says):
        resolve_model(str(tmp_path))


def test_unsupported_family_names_the_missing_fields(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "d_model": 64}))
    with pytest.raises(ValueError, match="'mamba' lacks hidden_size, intermediate_size"):
        resolve_model(str(tmp_path))


def test_unreadable_and_absent_configs(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list, expected an object"):
        resolve_model(str(tmp_path))
    for odd in ("[" * 100_000, '{"a": ' + "1" * 5000 + "}"):
        (tmp_path / "config.json").write_text(odd)
        with pytest.raises(ValueError, match=r"config\.json is not readable JSON"):
            resolve_model(str(tmp_path))


def test_unknown_model_lists_near_presets(monkeypatch):
    with pytest.raises(ValueError, match="did you mean 'llama-3-70b'"):
        resolve_model("llama3-70b")


def test_a_hub_id_that_is_nearly_a_preset_is_told_so():
    with pytest.raises(ValueError, match=r"the hub cannot be reached .*, or go online \(did you mean 'llama-3-70b'"):
        resolve_model("meta/llama-3-70b")


def test_a_shape_is_a_model_too():
    assert plan(ModelShape(**{**LLAMA_70B.to_dict(), "num_layers": 8}), tp=[8])[0].model == "llama"


@pytest.mark.parametrize(("weights", "share"), [("fp8", 1 / 2), ("int4", 1 / 4 + 1 / 128)])
def test_quantised_layers_are_read_and_held_in_fewer_bytes(weights, share):
    plain, small = (replace(case, device=replace(case.device, tflops=1e5)) for case in (one_case(), one_case(weights=weights)))
    shape, layers = RankShape(LLAMA_70B, 8), LLAMA_70B.num_layers
    matrices = DTYPE_BYTES * layers * (shape.attention_parameters + shape.mlp_parameters)
    saved = plain.rank().memory_bytes(1, 1024, 512)["weights"] - small.rank().memory_bytes(1, 1024, 512)["weights"]
    assert saved == pytest.approx((1 - share) * matrices)  # embeddings, head and norms stay
    bandwidth = 3350e3 * plain.device.bandwidth_share * plain.engine.read_share
    faster = sum(
        getattr(plain.rank(), part)(DECODE).us - getattr(small.rank(), part)(DECODE).us for part in ("attention", "mlp")
    )
    assert layers * faster == pytest.approx((1 - share) * matrices / bandwidth, rel=1e-6)
    assert small.rank().head(DECODE) == plain.rank().head(DECODE)
    prefill = Phase(batch=8, tokens=2048, context=2048)
    assert one_case(weights=weights).rank().mlp(prefill) == one_case().rank().mlp(prefill)  # multiplied as bf16


def test_an_fp8_cache_is_half_as_large_and_read_in_half_the_time():
    plain, small = one_case().rank(), one_case(kv_cache="fp8").rank()
    assert small.memory_bytes(4, 1024, 512)["kv_cache"] == plain.memory_bytes(4, 1024, 512)["kv_cache"] / 2
    longer = DECODE._replace(context=101_280)
    grown, half = (cost.attention(longer).us - cost.attention(DECODE).us for cost in (plain, small))
    assert half == pytest.approx(grown / 2)


def test_what_is_quantised_is_said(tmp_path):
    [row] = plan("llama-3-70b", weights="int4", kv_cache_dtype="fp8")
    assert "(tp 8, nccl, batch 1, int4 weights, fp8 KV cache)" in row.advice
    assert (row.to_dict()["weights"], row.to_dict()["kv_cache_dtype"]) == ("int4", "fp8")
    for asked in ({"weights": "int3"}, {"kv_cache_dtype": "fp4"}):
        with pytest.raises(ValueError, match=r"unknown (weights 'int3'|kv-cache-dtype 'fp4').* choose bf16, fp8"):
            plan("llama-3-70b", **asked)
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantised}))
    assert [plan(str(tmp_path), tp=2, **asked)[0].weights for asked in ({}, {"weights": "bf16"})] == ["int4", "bf16"]
    cached = written.compressed_tensors("float-quantized", {}) | {"kv_cache_scheme": {"num_bits": 8}}
    for other, says in (
        (quantised | {"bits": 2}, "bits is 2, supported is 4"),
        (cached, "kv_cache_scheme is .*, supported is none"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported: .*"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": other}))
        with pytest.raises(ValueError, match=f"{says}; or give --weights$"):
            plan(str(tmp_path), tp=2)
        assert plan(str(tmp_path), tp=2, weights="fp8")[0].weights == "fp8"


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("mixtral-8x22b", 140.6e9, 39.2e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235.1e9, 22.2e9),
    ],
)
def test_mixtures_count_all_their_experts_and_read_those_a_token_takes(name, parameters, active):
    """Both numbers as published."""
    shape = presets()[name]
    experts = shape.experts
    assert shape.parameters == pytest.approx(parameters, rel=0.002)
    idle = shape.num_layers * 3 * shape.hidden_size * experts.size * (experts.count - experts.per_token)
    assert shape.parameters - idle == pytest.approx(active, rel=0.02)
    cost = rank(shape, tp=2)
    read = shape.hidden_size * (3 * experts.per_token * experts.size / 2 + experts.count)
    bandwidth = 4800e3 * cost.device.bandwidth_share * cost.engine.read_share
    assert cost.mlp(DECODE).memory_us == pytest.approx(DTYPE_BYTES * read / bandwidth, rel=0.01)
    assert cost.memory_bytes(1, 16, 16)["weights"] == pytest.approx(shape.parameters * DTYPE_BYTES / 2, rel=0.01)


def test_every_rank_holds_the_whole_router():
    for name, router in (("mixtral-8x7b", 4096 * 8), ("qwen3-30b-a3b", 2048 * 128)):
        shape = presets()[name]
        matrices = 3 * shape.hidden_size * shape.experts.count * shape.experts.size
        assert shape.mlp_parameters == matrices + router
        assert RankShape(shape, 4).mlp_parameters == matrices / 4 + router


def test_activations_of_a_mixture_are_of_the_experts_a_token_takes():
    few = replace(presets()["qwen3-30b-a3b"], experts=Experts(count=128, per_token=8, size=768, shared_size=512))
    many = replace(few, experts=replace(few.experts, per_token=16))
    small, large = (rank(shape, tp=4).memory_bytes(2, 1000, 16)["activations"] for shape in (few, many))
    widest, logits = 2 * (8 * 768 + 512) / 4, 2 * 151936 / 4  # gate and up
    assert small == DTYPE_BYTES * (2000 * (3 * 2048 + widest) + logits)
    assert large - small == DTYPE_BYTES * 2000 * 2 * (8 * 768) / 4
    assert rank(replace(few, intermediate_size=100_000), tp=4).memory_bytes(2, 1000, 16)["activations"] == small


def test_more_tokens_need_more_experts_until_all_are_read():
    shape = presets()["qwen3-30b-a3b"]
    assert [shape.experts.read(tokens) for tokens in (1, 2)] == pytest.approx([8, 15.5])
    assert shape.experts.read(1000) == pytest.approx(128)
    cost = rank(shape, tp=2)
    times = [cost.mlp(Phase(batch=batch, tokens=1, context=64)).memory_us for batch in (1, 2, 4, 16, 64, 256)]
    assert times == sorted(times)
    assert times[1] < 2 * times[0]
    assert times[-1] < 1.3 * times[-2]


def test_one_expert_for_all_tokens_is_a_dense_mlp():
    """The mixture's slow twin: with a single expert the two formulas must meet, but for the router."""
    dense = presets()["llama-3.1-8b"]
    one = replace(dense, experts=Experts(count=1, per_token=1, size=dense.intermediate_size))
    for phase in (DECODE, Phase(batch=16, tokens=1, context=100), Phase(batch=4, tokens=512, context=512)):
        assert rank(one).mlp(phase).us == pytest.approx(rank(dense).mlp(phase).us, rel=0.03)


def test_mixtures_from_a_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **QWEN3_MOE}))
    _, shape = resolve_model(str(tmp_path))
    assert shape.experts == Experts(count=8, per_token=2, size=32)
    assert ModelShape.from_hf({"model_type": "qwen3_moe", **shape.to_hf()}) == shape
    assert ModelShape(**shape.to_dict()) == shape
    assert plan(str(tmp_path), tp=2)[0].fits
    shared = {**CONFIG, **QWEN3_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 48}
    assert ModelShape.from_hf(shared).experts.shared_size == 48
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **QWEN3_MOE, "moe_intermediate_size": 33}))
    with pytest.raises(ValueError, match="tp=2 does not divide the 33 neurons of an expert"):
        plan(str(tmp_path), tp=2)


def test_what_takes_dense_models_says_so_of_a_mixture():
    with pytest.raises(ValueError, match="random weights takes dense models, and this mixtral is a mixture of 8 experts"):
        random_model(presets()["mixtral-8x7b"], World())
    with pytest.raises(ValueError, match=r"model\.preset takes dense models, and this qwen3_moe is a mixture of 128"):
        Model(preset="qwen3-30b-a3b").shape()
