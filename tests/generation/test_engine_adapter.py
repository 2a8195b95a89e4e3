"""The engine under `generate`, with the reference in the place of the CUDA kernels: same text as the model itself."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ladder_residual import rewire
from ladder_residual.core.config import Wiring
from ladder_residual.distributed.world import EmulatedRank, World
from ladder_residual.engine.checks import check_weights
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import stack_weights
from ladder_residual.generation.completion import complete, fits
from ladder_residual.generation.engine_adapter import EngineModel, right_padded
from ladder_residual.generation.engine_choice import with_engine
from ladder_residual.generation.sampling import Sampling
from ladder_residual.generation.tokenizer import load_tokenizer
from ladder_residual.models.hf import wiring_of
from ladder_residual.models.loading import load_model
from tests.engine.reference import ReferenceDecoder
from tests.tiny_models import clone, random_ids, tiny_model


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
    with pytest.raises(ValueError, match="unknown reducer 'mpi'; choose auto, nccl, symm"):
        with_engine(model, World(), "auto", **options, reducer="mpi")
    with pytest.raises(ValueError, match="--reducer symm is the CUDA engine's"):
        with_engine(model, World(), "auto", **options, reducer="symm")
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8 is the CUDA engine's"):
        with_engine(model, World(device=torch.device("cuda")), "torch", **options, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="cannot follow beams"):  # no slow path has such a cache
        with_engine(model, World(device=torch.device("cuda")), "auto", **options | {"beams": 2}, kv_cache_dtype="fp8")
    with pytest.warns(UserWarning, match="using the slow path: the CUDA engine's cache cannot follow beams"):
        assert with_engine(model, World(device=torch.device("cuda")), "auto", **options | {"beams": 2}) is model


GPU = torch.device("cuda")


def pretended_gpu(check, dtype, device, **how):
    check(dtype, GPU, **how)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch": 300}, "batch 300 is outside"),
        ({"wiring": "delayed-5"}, "delayed-1 to delayed-4, not delayed-5"),
        ({"dtype": torch.float64}, "runs bfloat16 or float16, not torch.float64"),
        ({"free": 1}, "the KV cache of batch 2 at context 64 needs"),
        ({"size": 3}, "does not divide into tp=3"),
        ({"shape": True}, "has shape"),
    ],
)
def test_a_refused_model_still_holds_its_weights(change, reason, monkeypatch):
    """A model that was emptied already would be no fallback. The GPU is pretended; nothing gets as far as it."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(change.get("dtype", torch.bfloat16))
    if "wiring" in change:
        monkeypatch.setattr(
            "ladder_residual.generation.engine_adapter.wiring_of", lambda config: Wiring.parse(change["wiring"], 2)
        )
    if "shape" in change:
        model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[1].mlp.up_proj.weight.data[:7]
    monkeypatch.setattr("ladder_residual.engine.checks.check_weights", partial(pretended_gpu, check_weights))
    monkeypatch.setattr("ladder_residual.common.memory.free_bytes", lambda device: change.get("free", 10**12))
    rank = EmulatedRank(change.get("size", 1), device=GPU)
    before = model.lm_head.weight.clone()
    with pytest.warns(UserWarning, match=f"using the slow path: .*{reason}"):
        kept = with_engine(model, rank, "auto", batch=change.get("batch", 2), context=64, beams=1, schedule="auto")
    assert kept is model
    torch.testing.assert_close(model.lm_head.weight, before)  # not on the meta device
    with pytest.raises(ValueError, match=reason):
        with_engine(model, rank, "cuda", batch=change.get("batch", 2), context=64, beams=1, schedule="auto")


def test_a_chat_leaves_room_in_the_engines_cache(demo_dir):
    model, tokenizer = load_model(demo_dir), load_tokenizer(demo_dir)
    sampling = Sampling(max_new_tokens=10)
    assert fits(model, tokenizer, "Once upon a time", sampling)
    fast = EngineModel(model.config, model.generation_config, SimpleNamespace(batch=1, max_context=12), torch.device("cpu"))
    assert not fits(fast, tokenizer, "Once upon a time", sampling)
