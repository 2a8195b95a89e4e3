"""The same recurrence for any residual network: encoders, vision transformers, mixers.

    blocks = [(attention_branch, mlp_branch) for block in vit.blocks]
    chain = ResidualChain(blocks, wiring="ladder")
    y = chain(x)

A branch is an ``nn.Module`` that computes what is *added* to the stream, its norm included: h in x = x + h(x). With a reducer of
several ranks a branch returns this rank's partial.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from .config import Wiring
from .reduce import Reducer
from .wiring import Branch, State, finalize, step


class ResidualChain(nn.Module):
    """Blocks of one or more residual branches each, wired by a spec string over the blocks (``ladder:last-half`` ...)."""

    def __init__(
        self, blocks: Iterable[nn.Module | Sequence[nn.Module]], wiring: str = "ladder", reducer: Reducer | None = None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([block] if isinstance(block, nn.Module) else list(block)) for block in blocks)
        widths = {len(list(block.children())) for block in self.blocks}
        if len(widths) != 1 or 0 in widths:
            raise ValueError(f"every block needs the same number of branches, at least one; got {sorted(widths)}")
        self.wiring = Wiring.parse(wiring, len(self.blocks))
        self.reducer = reducer or Reducer()

    def forward(self, x: Tensor) -> Tensor:
        state = State(x)
        for layer, block in enumerate(self.blocks):
            state = step(self.wiring, layer, state, [Branch(branch) for branch in block.children()], self.reducer)
        return finalize(state, self.reducer)
