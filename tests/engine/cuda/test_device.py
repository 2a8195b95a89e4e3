from __future__ import annotations

import pytest
import torch

from ladder_residual.engine.cuda.device import is_hopper


@pytest.mark.parametrize(("capability", "hopper"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_which_gpus_have_pdl(capability: tuple[int, int], hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assembler of older ones knows neither griddepcontrol nor bulk prefetches."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert is_hopper(torch.device("cuda")) == hopper
    assert not is_hopper(torch.device("cpu"))
