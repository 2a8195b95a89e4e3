"""The engine under `generate`, with its slow reference in the place of the CUDA kernels: same text as the model itself."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from ladder_residual import rewire
from ladder_residual.config import Wiring
from ladder_residual.engine import reducers
from ladder_residual.engine.backend import EngineModel, right_padded
from ladder_residual.engine.decoder import DecodeEngine, check_weights, prefill_bytes
from ladder_residual.engine.reference import ReferenceDecoder
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import check_shapes, stack_weights
from ladder_residual.generate import Sampling, complete, fits, load_tokenizer, with_engine
from ladder_residual.loading import load_model
from ladder_residual.memory import require
from ladder_residual.model import wiring_of
from ladder_residual.parallel import World
from ladder_residual.presets import ModelShape
from ranks import run_on_ranks
from tiny_models import clone, random_ids, tiny_model


class ReferenceEngine:
    """A reference decoder per sequence, behind the calls of the engine."""

    def __init__(self, model, batch):
        self.batch, self.max_context = batch, 512
        spec = EngineSpec.from_hf(model.config.to_dict() | {"attention_bias": False, "mlp_bias": False})
        weights = dict(model.named_parameters())
        stacked = stack_weights(spec, RankSizes.of(spec.shape, 1, 0), weights)
        self.make = lambda: ReferenceDecoder(spec, wiring_of(model.config), [stacked], tp=1)

    def prefill(self, input_ids, lengths):
        assert input_ids.shape[0] == self.batch
        self.rows = [self.make() for _ in range(self.batch)]
        return torch.stack(
            [row.forward(ids[None, :length])[0, -1] for row, ids, length in zip(self.rows, input_ids, lengths, strict=True)]
        )

    def decode(self, tokens):
        assert tokens.shape == (self.batch,)
        return torch.stack([row.forward(token.view(1, 1))[0, -1] for row, token in zip(self.rows, tokens, strict=True)])

    def gather(self, logits):
        return logits

    def decisive(self, logits, needed):
        best = logits.topk(needed.best)
        return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)


@pytest.mark.parametrize("spec", ["standard", "ladder", "ladder:last-half"])
@torch.no_grad()
def test_greedy_and_sampled_tokens_equal_the_model(spec):
    model = rewire(tiny_model("llama", attention_bias=False, mlp_bias=False, head_dim=64), spec)
    ids, mask = random_ids(3, 7), torch.ones(3, 7, dtype=torch.long)
    mask[1, :3] = 0
    inputs = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    fast = EngineModel(model.config, model.generation_config, ReferenceEngine(clone(model), 3), torch.device("cpu"))
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20, "temperature": 0.7}):
        texts = []
        for which in (model, fast):
            torch.manual_seed(3)
            texts.append(which.generate(**inputs, max_new_tokens=10, pad_token_id=0, **options))
            if which is fast:
                fast.start()
        assert torch.equal(*texts)


def test_smaller_batches_are_filled_up(demo_dir):
    model, tokenizer = load_model(demo_dir), load_tokenizer(demo_dir)
    greedy = Sampling(max_new_tokens=12, temperature=0)
    prompts = ["Once upon a time", "The dog and"]

    class Small(ReferenceEngine):
        def __init__(self, model, batch):
            # the shipped model's heads of 8 are below what the kernels take; the reference does not mind
            import ladder_residual.engine.spec as spec_module

            sizes, spec_module.HEAD_DIMS = spec_module.HEAD_DIMS, (8,)
            super().__init__(model, batch)
            spec_module.HEAD_DIMS = sizes

    fast = EngineModel(model.config, model.generation_config, Small(model, 3), torch.device("cpu"))
    expected = [c.text for c in complete(model, tokenizer, prompts, greedy, World())]
    assert [c.text for c in complete(fast, tokenizer, prompts, greedy, World())] == expected
    assert [c.text for c in complete(fast, tokenizer, prompts[:1], greedy, World())] == expected[:1]


def test_prompts_move_from_left_to_right_padding():
    ids = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
    packed, lengths = right_padded(ids, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    assert packed.tolist() == [[5, 6, 0, 0], [1, 2, 3, 4]]
    assert lengths.tolist() == [2, 4]


def test_what_the_engine_cannot_take_falls_back_or_is_refused(demo_dir):
    model = load_model(demo_dir)
    options = dict(batch=1, context=64, beams=1, schedule="auto")
    assert with_engine(model, World(), "auto", **options) is model  # no GPU: nothing to warn about
    assert with_engine(model, World(), "torch", **options) is model
    with pytest.raises(ValueError, match="needs a GPU"):
        with_engine(model, World(), "cuda", **options)
    with pytest.raises(ValueError, match="unknown engine 'fast'"):
        with_engine(model, World(), "fast", **options)
    with pytest.raises(ValueError, match="unknown reducer 'mpi'; choose nccl or symm"):
        with_engine(model, World(), "auto", **options, reducer="mpi")
    with pytest.raises(ValueError, match="--reducer symm is the CUDA engine's"):
        with_engine(model, World(), "auto", **options, reducer="symm")
    with pytest.warns(UserWarning, match="using the slow path: the CUDA engine's cache cannot follow beams"):
        assert with_engine(model, World(device=torch.device("cuda")), "auto", **options | {"beams": 2}) is model


def _made(world, dtype):
    """What a rank ends up with, and what it said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        place = {"tp": 2, "link": None, "dtype": dtype, "device": world.device}
        made = reducers.make_reducer("symm", groups=(world.group, world.group), **place)
    return made.name, [str(warning.message) for warning in said]


def _made_with_pretended_memory(world, dtype, broken):
    def hold(_, rows, hidden, dtype, device):
        if world.rank == broken:
            raise RuntimeError("too few handles\nand more")
        return torch.empty(rows, hidden, dtype=dtype)

    reducers.SymmetricReducer.hold = hold
    reducers.SymmetricReducer.meet = reducers.SymmetricReducer.reduce = lambda *_: None
    torch.cuda.synchronize = lambda *_: None
    return _made(world, dtype)


@pytest.mark.parametrize(
    ("dtype", "broken", "name", "reasons"),
    [
        (torch.bfloat16, None, "symm", ["", ""]),
        (torch.bfloat16, 1, "nccl", ["another rank has none", "too few handles"]),
        (torch.float16, None, "nccl", ["not torch.float16", "not torch.float16"]),
    ],
)
def test_symmetric_memory_is_used_by_all_ranks_or_none(dtype, broken, name, reasons):
    for (made, said), reason in zip(run_on_ranks(2, _made_with_pretended_memory, dtype, broken), reasons, strict=True):
        assert made == name
        assert [reason in text for text in said] == ([True] if reason else [])


def _agreed(world, refusing):
    engine = object.__new__(DecodeEngine)  # of an engine only its group: the rest needs a GPU
    engine.sizes, engine.device, engine._groups = SimpleNamespace(tp=2), world.device, (world.group, world.group)
    return engine._all_ranks(world.rank != refusing)


@pytest.mark.parametrize(("refusing", "agreed"), [(None, True), (0, False), (1, False)])
def test_ranks_read_before_they_wait_all_or_none(refusing, agreed):
    assert run_on_ranks(2, _agreed, refusing) == [agreed, agreed]


def test_without_symmetric_memory_nccl_sums():
    """The real attempt, on a machine that has none."""
    for made, said in run_on_ranks(2, _made, torch.bfloat16):
        assert made == "nccl"
        assert len(said) == 1
        assert "no symmetric memory here" in said[0]
    with pytest.raises(ValueError, match="'symm' needs groups"):
        reducers.make_reducer("symm", tp=2, link=None, groups=None, dtype=torch.bfloat16, device=torch.device("cpu"))


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch": 300}, "batch 300 is outside"),
        ({"wiring": "delayed-1"}, "no delayed-1 wiring"),
        ({"dtype": torch.float64}, "runs bfloat16 or float16, not torch.float64"),
        ({"free": 1}, "the KV cache of batch 2 at context 64 needs"),
        ({"size": 3}, "does not divide into tp=3"),
        ({"shape": True}, "has shape"),
    ],
)
def test_a_refused_model_still_holds_its_weights(change, reason, monkeypatch):
    """Falling back to a model that was emptied already would be no way back. The GPU is pretended; nothing gets as far as it."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(change.get("dtype", torch.bfloat16))
    if "wiring" in change:
        monkeypatch.setattr("ladder_residual.engine.backend.wiring_of", lambda config: Wiring.parse(change["wiring"], 2))
    if "shape" in change:
        model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[1].mlp.up_proj.weight.data[:7]
    monkeypatch.setattr("ladder_residual.engine.decoder.check_weights", partial(pretended_gpu, check_weights))
    monkeypatch.setattr("ladder_residual.memory.free_bytes", lambda device: change.get("free", 10**12))
    world = World(size=change.get("size", 1), device=GPU, emulated=True)
    before = model.lm_head.weight.clone()
    with pytest.warns(UserWarning, match=f"using the slow path: .*{reason}"):
        kept = with_engine(model, world, "auto", batch=change.get("batch", 2), context=64, beams=1, schedule="auto")
    assert kept is model
    torch.testing.assert_close(model.lm_head.weight, before)  # not on the meta device
    with pytest.raises(ValueError, match=reason):
        with_engine(model, world, "cuda", batch=change.get("batch", 2), context=64, beams=1, schedule="auto")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM])
def test_what_the_engine_takes_is_not_refused(kind, tied):
    """The names and shapes a loaded rank really has."""
    model = kind(
        kind.config_class(
            vocab_size=96, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, tie_word_embeddings=tied,
        )
    )  # fmt: skip
    spec = EngineSpec.from_hf(model.config.to_dict())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    check_shapes(spec, RankSizes.of(spec.shape, 1, 0), shapes)
    with pytest.raises(ValueError, match="lacks model.norm.weight"):
        check_shapes(
            spec, RankSizes.of(spec.shape, 1, 0), {name: shape for name, shape in shapes.items() if name != "model.norm.weight"}
        )


def pretended_gpu(check, dtype, device, **how):
    check(dtype, GPU, **how)


def test_float32_runs_where_it_is_asked_for():
    """The kernels are made for weights of two bytes; float32 is there to compare."""
    with pytest.raises(ValueError, match="not torch.float32: use --dtype bfloat16, or --engine cuda to compare"):
        check_weights(torch.float32, GPU)
    check_weights(torch.float32, GPU, exact=True)
    with pytest.raises(ValueError, match="not torch.float64: use --dtype bfloat16$"):
        check_weights(torch.float64, GPU, exact=True)


def test_a_prompt_that_does_not_fit_the_card_is_told_in_numbers(monkeypatch):
    shape = ModelShape.from_name("llama-3-70b")
    sizes = RankSizes.of(shape, 8, 0)
    need = prefill_bytes(sizes, 4 * 32768, 2, sums_apart=True)
    assert prefill_bytes(sizes, 4 * 32768, 2, sums_apart=False) < need
    assert 30e9 < need < 120e9  # messages 8192 wide and an MLP of 3584, for 131,072 rows
    monkeypatch.setattr("ladder_residual.memory.free_bytes", lambda device: int(need) - 1)
    with pytest.raises(ValueError, match=rf"^reading needs {need / 1e9:.1f} GB, {need / 1e9:.1f} GB are free: fewer$"):
        require(need, GPU, "reading", "fewer")
    require(need - 2, GPU, "reading", "fewer")


def test_a_chat_leaves_room_in_the_engines_cache(demo_dir):
    model, tokenizer = load_model(demo_dir), load_tokenizer(demo_dir)
    sampling = Sampling(max_new_tokens=10)
    assert fits(model, tokenizer, "Once upon a time", sampling)
    fast = EngineModel(model.config, model.generation_config, SimpleNamespace(batch=1, max_context=12), torch.device("cpu"))
    assert not fits(fast, tokenizer, "Once upon a time", sampling)
