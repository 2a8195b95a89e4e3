"""What a conversion costs before any training: perplexity, with the paired error of the difference.

python examples/evaluate_model.py [SOURCE TEXT]
"""

import sys
import tempfile
from pathlib import Path

import ladder_residual as ladder

with tempfile.TemporaryDirectory() as folder:
    if len(sys.argv) > 2:
        source, text = sys.argv[1:3]
    else:
        source = ladder.export_demo(Path(folder, "stories"))
        text = source / "stories.txt"
    converted = ladder.convert(source, Path(folder, "converted"), "ladder:last-half").target
    result = ladder.evaluate(converted, perplexity=text, against=source, context=256, stride=128)
    before, after = result["against"]["perplexity"], result["perplexity"]
    difference = result["perplexity_comparison"]
    print(f"perplexity {before['ppl']:.2f} -> {after['ppl']:.2f}")
    print(f"{difference['difference']:+.4f} ± {difference['paired_stderr']:.4f} nats per token")
    # Tasks of lm-evaluation-harness: ladder.evaluate(model, tasks=["arc_easy", "piqa"], limit=100)
