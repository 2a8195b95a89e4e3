"""Recovery training on a real GPU: the step as a CUDA graph against the plain step.

``PYTHONPATH=src:. python tests/gpu/test_adapt_gpu.py`` runs it from a clone without pytest.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
except ImportError:  # a bare machine: main() below calls the tests
    pass

from ladder_residual.adapt.run import adapt
from ladder_residual.adapt.settings import AdaptSettings, DataSource
from ladder_residual.bench.demo import demo_directory
from ladder_residual.distributed.world import distributed
from ladder_residual.models.convert import convert

FAST = dict(sequence=128, batch_tokens=2048, tokens=2048 * 12, learning_rate=1e-3, log_every=1, progress=False)


def losses(folder: Path, name: str, **changes) -> list[float]:
    settings = AdaptSettings(
        student=str(folder / "ladder"),
        teacher=str(demo_directory()),
        out=str(folder / name),
        data=(DataSource(str(folder / "train.txt")),),
        **FAST | changes,
    )
    with distributed("cuda") as world:
        adapt(settings, world, lambda line: None)
    lines = (folder / f"{name}.training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_recorded_step_trains_like_a_plain_one():
    """Stages and the end of hidden-state matching record anew; the losses must not notice."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        convert(demo_directory(), folder / "ladder", "ladder")
        stories = (demo_directory() / "stories.txt").read_text(encoding="utf-8")
        (folder / "train.txt").write_text(stories.replace("\n\n", "\n<|endoftext|>\n"), encoding="utf-8")
        for number, changes in enumerate(
            [
                dict(),
                dict(hidden_weight=1.0, hidden_share=0.5, stages=("ladder:3-4",)),
                dict(optimizer="muon", data_weight=0.2),
                dict(method="sft"),
            ]
        ):
            plain = losses(folder, f"plain-{number}", **changes)
            graphed = losses(folder, f"graphed-{number}", graphs=True, **changes)
            assert len(graphed) == 12
            difference = max(abs(a - b) for a, b in zip(plain, graphed, strict=True))
            assert difference < 0.02, (changes, plain, graphed)  # bf16, added in another order


def main() -> None:
    test_a_recorded_step_trains_like_a_plain_one()
    print("ok")


if __name__ == "__main__":
    main()
