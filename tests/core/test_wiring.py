"""The recurrences on toy modules, and the proof of the overlap."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ladder_residual.config import Wiring
from ladder_residual.reduce import RecordingReducer
from ladder_residual.residual import ResidualChain
from ladder_residual.wiring import Branch, State, flush, step


def toy_modules(count, width=6):
    torch.manual_seed(count)
    return [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in range(count)]


def run(spec, modules, x, reducer):
    layers = len(modules) // 2
    wiring, state = Wiring.parse(spec, layers), State(x)
    for layer in range(layers):
        branches = [Branch(module) for module in modules[2 * layer : 2 * layer + 2]]
        state = step(wiring, layer, state, branches, reducer)
    return flush(state, reducer)


def by_hand(modules, x, ladder_layers):
    xs = [x]
    for i, h in enumerate(modules):
        read = xs[max(len(xs) - 2, 0)] if i // 2 in ladder_layers else xs[-1]
        xs.append(xs[-1] + h(read))
    return xs[-1]


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.data())
def test_any_hybrid_follows_the_recurrence(layers, batch, dtype, data):
    ladder = data.draw(st.sets(st.integers(0, layers - 1)))
    modules = [module.to(dtype) for module in toy_modules(2 * layers)]
    x = torch.randn(batch, 3, 6, dtype=dtype)
    spec = "ladder:" + ",".join(map(str, ladder)) if ladder else "standard"
    recorder = RecordingReducer()
    assert torch.equal(run(spec, modules, x, recorder), by_hand(modules, x, ladder))
    recorder.check_each_waited_once()


@pytest.mark.parametrize("spec", ["parallel", "desync-2x", "desync-3x", "delayed-1", "delayed-2", "no-comm"])
def test_one_rank_makes_the_other_wirings_what_they_reduce_to(spec):
    """With one rank nothing is missing from a partial: desync, delayed and no-comm are the standard chain."""
    modules, x = toy_modules(8), torch.randn(3, 5, 6)
    result = run(spec, modules, x, RecordingReducer())
    if spec == "parallel":
        expected = x
        for attention, mlp in zip(modules[::2], modules[1::2], strict=True):
            expected = expected + (attention(expected) + mlp(expected))
    else:
        expected = by_hand(modules, x, ())
    torch.testing.assert_close(result, expected)


def recorded(spec, layers=4):
    modules, recorder = toy_modules(2 * layers), RecordingReducer()
    for index, module in enumerate(modules):
        recorder.watch(module, f"h{index}")
    run(spec, modules, torch.randn(2, 3, 6), recorder)
    return recorder


def test_ladder_never_waits_for_the_sum_started_just_before():
    recorder = recorded("ladder")
    recorder.check_each_waited_once()
    for k in range(7):  # every module but the last has a successor to hide under
        begun, computed = recorder.events.index(("start", k)), recorder.events.index(("compute", f"h{k + 1}"))
        assert ("wait", k) not in recorder.events[begun:computed]
    assert recorder.hidden() == [True] * 7 + [False]


def test_standard_waits_for_every_sum_before_it_computes():
    recorder = recorded("standard")
    for k in range(7):
        begun, computed = recorder.events.index(("start", k)), recorder.events.index(("compute", f"h{k + 1}"))
        assert ("wait", k) in recorder.events[begun:computed]
    assert recorder.hidden() == [False] * 8


def test_a_hybrid_hides_in_its_ladder_layers():
    # The last standard MLP (3) hides too: the first ladder attention reads x_{i-2}, the stream without it.
    assert recorded("ladder:2-3").hidden() == [False, False, False, True, True, True, True, False]


def test_delayed_keeps_as_many_sums_in_flight_as_it_says():
    assert recorded("delayed-1").hidden() == [True] * 7 + [False]
    events = recorded("delayed-3").events
    assert events.index(("wait", 0)) > events.index(("compute", "h3"))


def test_desync_sums_every_nth_module():
    assert len([e for e in recorded("desync-2x").events if e[0] == "start"]) == 4
    assert len([e for e in recorded("desync-4x").events if e[0] == "start"]) == 2
    assert len([e for e in recorded("desync-3x").events if e[0] == "start"]) == 3  # after modules 3 and 6, and at the end
    assert not [e for e in recorded("no-comm").events if e[0] == "start"]


def test_an_unwaited_sum_is_reported():
    recorder = RecordingReducer()
    pending = recorder.start(torch.ones(2))
    with pytest.raises(AssertionError, match="waited for 0 times"):
        recorder.check_each_waited_once()
    pending.wait()
    recorder.check_each_waited_once()
    pending.wait()
    with pytest.raises(AssertionError, match="waited for 2 times"):
        recorder.check_each_waited_once()


class EncoderBranch(nn.Module):
    """One residual branch of torch's own pre-norm encoder layer."""

    def __init__(self, layer, name):
        super().__init__()
        self.layer, self.name = layer, name

    def forward(self, x):
        if self.name == "attention":
            return self.layer._sa_block(self.layer.norm1(x), None, None)
        return self.layer._ff_block(self.layer.norm2(x))


class MixerBranch(nn.Module):
    """Token mixing or channel mixing of an MLP-mixer."""

    def __init__(self, width, tokens, mix_tokens):
        super().__init__()
        self.norm, self.mix_tokens = nn.LayerNorm(width), mix_tokens
        size = tokens if mix_tokens else width
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x):
        x = self.norm(x)
        return self.mlp(x.transpose(1, 2)).transpose(1, 2) if self.mix_tokens else self.mlp(x)


def encoder_blocks():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    return encoder, [(EncoderBranch(block, "attention"), EncoderBranch(block, "mlp")) for block in encoder.layers]


def mixer_blocks():
    return [(MixerBranch(16, 7, True), MixerBranch(16, 7, False)) for _ in range(4)]


def test_a_generic_chain_with_standard_wiring_is_torchs_encoder():
    encoder, blocks = encoder_blocks()
    x = torch.randn(3, 7, 16)
    torch.testing.assert_close(ResidualChain(blocks, "standard")(x), encoder(x))


@pytest.mark.parametrize("make", [lambda: encoder_blocks()[1], mixer_blocks], ids=["encoder", "mixer"])
@pytest.mark.parametrize(("spec", "ladder"), [("ladder", range(4)), ("ladder:last-half", (2, 3)), ("ladder:1", (1,))])
def test_generic_networks_follow_the_recurrence(make, spec, ladder):
    blocks, x = make(), torch.randn(3, 7, 16)
    flat = [branch for block in blocks for branch in block]
    torch.testing.assert_close(ResidualChain(blocks, spec)(x), by_hand(flat, x, ladder))


def test_generic_chain_with_single_branches_trains():
    chain = ResidualChain(toy_modules(5), "ladder")
    chain(torch.randn(3, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in chain.parameters())
    with pytest.raises(ValueError, match="same number of branches"):
        ResidualChain([toy_modules(1), toy_modules(2)])
