"""Any residual network can be laddered: a small vision transformer, block by block.

python examples/ladder_vit.py
"""

import torch
from torch import nn

from ladder_residual.core.residual import ResidualChain


class Attention(nn.Module):
    """What attention adds to the stream, its norm included."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.attention(x, x, x, need_weights=False)[0]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class ViT(nn.Module):
    def __init__(self, wiring: str, width: int = 64, depth: int = 6, patch: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (32 // patch) ** 2, width) * 0.02)
        self.trunk = ResidualChain([(Attention(width, 4), mlp(width)) for _ in range(depth)], wiring)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # [batch, patches, width]
        return self.head(self.trunk(x).mean(1))


if __name__ == "__main__":
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    for wiring in ("standard", "ladder:last-half", "ladder"):
        torch.manual_seed(0)
        model = ViT(wiring)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for _ in range(30):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"{wiring:18} loss after 30 steps on one batch: {loss.item():.3f}")
