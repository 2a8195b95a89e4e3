"""The generic chain: encoders and mixers follow the recurrence."""

import pytest
import torch
from torch import nn

from ladder_residual.core.residual import ResidualChain
from tests.core.toy import by_hand, toy_modules


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
