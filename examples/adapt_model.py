"""Recover a converted model by distilling the original into it.

python examples/adapt_model.py [SOURCE TRAIN HELDOUT]
"""

import sys
import tempfile
from pathlib import Path

import ladder_residual as ladder

with tempfile.TemporaryDirectory() as folder:
    if len(sys.argv) > 3:
        source, train, heldout = sys.argv[1:4]
    else:
        source, train, heldout = (
            ladder.export_demo(Path(folder, "stories")),
            Path(folder, "train.txt"),
            Path(folder, "heldout.txt"),
        )
        stories = (source / "stories.txt").read_text().split("\n\n")
        train.write_text("\n\n".join(story for number, story in enumerate(stories) if number % 4))
        heldout.write_text("\n\n".join(stories[::4]))
    student = ladder.convert(source, Path(folder, "student"), "ladder").target
    result = ladder.adapt(
        student,
        teacher=source,
        data=train,
        heldout=heldout,
        tokens=20_480,
        sequence=128,
        batch_tokens=1024,
        learning_rate=1e-3,
    )
    print(f"{result.steps} steps, {result.tokens:,} tokens")
    for name, after in result.after.items():
        print(f"{name}: loss {result.before[name]['loss']:.2f} -> {after['loss']:.2f} nats per token")
