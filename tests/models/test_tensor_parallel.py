"""Sharded models on real processes: every wiring equals one process, or the oracle that simulates the ranks in one."""

import pytest
import torch

from ladder_residual import rewire
from ladder_residual.models.chunks import local_part
from ladder_residual.models.families import FAMILIES
from ladder_residual.models.loading import set_reducers
from ladder_residual.train.gradients import finish_gradients
from tests.ranks import run_on_ranks
from tests.recorder import Recorder
from tests.tiny_models import (
    FAMILY_NAMES,
    VOCAB,
    clone,
    padded_inputs,
    random_ids,
    relative,
    shard_model,
    simulated,
    tiny_model,
)

SHAREABLE = [name for name in FAMILY_NAMES if not FAMILIES[name].refuse_tp]
EQUIVALENT = ["standard", "ladder", "ladder:last-half", "ladder:0,2"]
RANK_DEPENDENT = ["desync-2x", "desync-3x", "desync-4x", "delayed-1", "delayed-2", "desync-2x:1-2", "delayed-1:2-3", "no-comm"]
# With biases, KV heads that four ranks must share, a vocabulary that nothing divides, embeddings tied or not.
VARIANTS = {"tied": dict(tie_word_embeddings=True), "untied": dict(tie_word_embeddings=False)}


def labels_of(inputs):
    return inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)


def gradient_error(model, whole):
    """The worst relative error of this rank's gradients against its part of the whole model's."""
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    return max(
        relative(parameter.grad, local_part(expected[name], model.shard_specs[name]))
        for name, parameter in model.named_parameters()
        if local_part(expected[name], model.shard_specs[name]).norm() > 1e-6
    )


def compare_with_one_process(world, family, spec, overrides, **call):
    """Errors of logits, loss, gradients and greedy tokens of this rank against the whole model in this process."""
    model, inputs = rewire(tiny_model(family, **overrides), spec), padded_inputs()
    whole = clone(model)
    expected = whole(**inputs, labels=labels_of(inputs), **call)
    expected.loss.backward()
    tokens = whole.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    shard_model(model, world)
    found = model(**inputs, labels=labels_of(inputs), **call)
    found.loss.backward()
    finish_gradients(model, world)
    same_tokens = torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0), tokens)
    real = inputs["attention_mask"].bool()
    return {
        "logits": relative(found.logits[real], expected.logits[real]),
        "loss": abs(found.loss.item() - expected.loss.item()),
        "gradients": gradient_error(model, whole),
        "tokens": same_tokens,
    }


def check_all(results):
    for rank, cases in enumerate(results):
        for case, errors in cases.items():
            assert errors["tokens"], (rank, case, errors)
            assert errors["logits"] < 1e-5, (rank, case, errors)
            assert errors["loss"] < 1e-5, (rank, case, errors)
            assert errors["gradients"] < 2e-4, (rank, case, errors)


def every_equivalent_wiring(world):
    return {
        (spec, variant): compare_with_one_process(world, "llama", spec, overrides)
        for spec in EQUIVALENT
        for variant, overrides in VARIANTS.items()
    }


@pytest.mark.parametrize("size", [2, 4])
def test_wirings_equal_one_process(size):
    check_all(run_on_ranks(size, every_equivalent_wiring))


def every_family(world):
    results = {family: compare_with_one_process(world, family, "ladder:last-half", {}) for family in SHAREABLE}
    for family in ("mixtral", "qwen2_moe", "qwen3_moe"):  # with the loss that balances the experts
        coefficient, asked = {"router_aux_loss_coef": 1.0}, {"output_router_logits": True}
        results[family, "balanced"] = compare_with_one_process(world, family, "ladder", coefficient, **asked)
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_families_equal_one_process(size):
    check_all(run_on_ranks(size, every_family))


@torch.no_grad()
def greedy_by_oracle(model, spec, ranks, ids, count):
    """No cache: every token from the whole sequence."""
    for _ in range(count):
        logits = simulated(model, spec, ranks, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids.tolist()


def every_rank_dependent_wiring(world):
    results = {}
    for spec in RANK_DEPENDENT:
        model, inputs = tiny_model("llama"), padded_inputs()
        real = inputs["attention_mask"].bool()
        oracle = clone(model)
        expected = simulated(oracle, spec, world.size, inputs)
        oracle.loss_function(expected, labels_of(inputs), vocab_size=VOCAB).backward()
        rewire(model, spec)
        shard_model(model, world)
        found = model(**inputs, labels=labels_of(inputs))
        found.loss.backward()
        finish_gradients(model, world)
        results[spec] = {
            "logits": relative(found.logits[real].detach(), expected[real].detach()),
            "gradients": gradient_error(model, oracle),
            "tokens": model.generate(random_ids(2, 5), max_new_tokens=4, do_sample=False, pad_token_id=0).tolist(),
            "oracle tokens": greedy_by_oracle(oracle, spec, world.size, random_ids(2, 5), 4),
        }
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_rank_dependent_wirings_equal_the_simulated_ranks(size):
    for cases in run_on_ranks(size, every_rank_dependent_wiring):
        for spec, errors in cases.items():
            assert errors["logits"] < 1e-5, (spec, errors)
            assert errors["gradients"] < 2e-4, (spec, errors)
            assert errors["tokens"] == errors["oracle tokens"], (spec, errors)


def backward_order(world, spec):
    """Starts, waits and computes of a backward, in order."""
    model, events = rewire(tiny_model("llama"), spec), []
    shard_model(model, world)
    reducer = world.reducer()
    launch = reducer.launch

    class Watched:
        def __init__(self, inner, number):
            self.inner, self.number = inner, number

        def wait(self):
            events.append(("wait", self.number))
            return self.inner.wait()

    def watched_launch(partial):
        events.append(("start", sum(kind == "start" for kind, _ in events)))
        return Watched(launch(partial), events[-1][1])

    set_reducers(model, reducer)
    for index, layer in enumerate(model.base_model.layers):
        for name in ("self_attn", "mlp"):
            getattr(layer, name).register_full_backward_pre_hook(
                lambda *_, label=f"{name}{index}": events.append(("compute", label))
            )
    loss = model(**padded_inputs(), labels=random_ids(3, 9)).loss
    reducer.launch = watched_launch
    loss.backward()
    return events


def hidden_in_backward(spec):
    events = run_on_ranks(2, backward_order, spec)[0]
    starts = [value for kind, value in events if kind == "start"]
    hidden = 0
    for number in starts:
        between = events[events.index(("start", number)) : events.index(("wait", number))]
        hidden += any(kind == "compute" for kind, _ in between)
    # Eight modules and the embedding send a gradient. The lowest attention's and the embedding's have nothing left to hide under.
    return len(starts), hidden


def test_backward_hides_its_all_reduces_too():
    assert hidden_in_backward("ladder") == (9, 7)
    assert hidden_in_backward("standard") == (9, 0)


def recorded_on_ranks(world):
    model, recorder = rewire(tiny_model("llama"), "ladder"), Recorder(world.reducer())
    for index, layer in enumerate(model.base_model.layers):
        recorder.watch(layer.self_attn, f"attention {index}")
        recorder.watch(layer.mlp, f"mlp {index}")
    shard_model(model, world, reducer=recorder)
    with torch.no_grad():
        model(**padded_inputs())
    recorder.check_each_waited_once()
    return recorder.hidden()


def test_overlap_on_real_ranks():
    # The first all-reduce is the embedding's: nothing can be computed before it is there.
    assert run_on_ranks(2, recorded_on_ranks)[0] == [False] + [True] * 7 + [False]


def checkpointed_gradients(world):
    errors = {}
    for spec in ("ladder", "ladder:last-half"):
        model = rewire(tiny_model("llama"), spec).train()
        shard_model(model, world)
        inputs = padded_inputs()
        model(**inputs, labels=labels_of(inputs), use_cache=False).loss.backward()
        finish_gradients(model, world)
        plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        model.gradient_checkpointing_enable()
        model(**inputs, labels=labels_of(inputs), use_cache=False).loss.backward()
        finish_gradients(model, world)
        errors[spec] = max(relative(parameter.grad, plain[name]) for name, parameter in model.named_parameters())
    return errors


def test_gradient_checkpointing_on_ranks():
    for errors in run_on_ranks(2, checkpointed_gradients):
        assert max(errors.values()) < 1e-5, errors


def uneven_ranks(world):
    """Six query heads and three KV heads on two ranks: two groups here, one there."""
    overrides = dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=96, intermediate_size=97)
    model, inputs = rewire(tiny_model("llama", **overrides), "ladder"), padded_inputs()
    with torch.no_grad():
        expected = model(**inputs).logits
        try:
            shard_model(clone(model), world)
        except ValueError as error:
            message = str(error)
        found = shard_model(model, world, uneven=True)(**inputs).logits
    return message, relative(found[inputs["attention_mask"].bool()], expected[inputs["attention_mask"].bool()])


def test_unequal_heads_are_refused_unless_asked_for():
    for message, error in run_on_ranks(2, uneven_ranks):
        assert "tp=2 does not divide 6 query heads with 3 KV heads" in message
        assert error < 1e-5


def random_cases(world, count):
    """Random shapes, wirings and dtypes; every rank draws the same ones."""
    generator = torch.Generator().manual_seed(3)

    def draw(choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    results = []
    for case in range(count):
        kv = draw([1, 2, 4])
        heads = kv * draw([1, 2, 3])
        if heads % world.size:
            heads *= world.size
        dtype = draw([torch.float32, torch.float64, torch.bfloat16])
        overrides = dict(
            num_attention_heads=heads,
            num_key_value_heads=kv,
            head_dim=draw([8, 16]),
            hidden_size=heads * 8,
            intermediate_size=world.size * draw([3, 8, 17]),
            vocab_size=draw([50, 64, 101]),
            num_hidden_layers=draw([1, 2, 3, 5]),
            tie_word_embeddings=draw([True, False]),
        )
        spec = draw(["standard", "ladder", "ladder:last-1", "ladder:0"])
        model = rewire(tiny_model("llama", seed=case, **overrides), spec).to(dtype)
        ids = torch.randint(3, overrides["vocab_size"], (draw([2, 3]), draw([1, 5])), generator=generator)
        with torch.no_grad():
            expected = model(ids).logits.double()
            found = shard_model(model, world)(ids).logits.double()
        results.append((overrides, spec, str(dtype), relative(found, expected)))
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_random_shapes_wirings_and_dtypes(size):
    tolerance = {"torch.float32": 1e-5, "torch.float64": 1e-12, "torch.bfloat16": 0.05}
    for cases in run_on_ranks(size, random_cases, 40):
        assert {dtype for _, _, dtype, _ in cases} == set(tolerance)
        for overrides, spec, dtype, error in cases:
            assert error < tolerance[dtype], (overrides, spec, dtype, error)
