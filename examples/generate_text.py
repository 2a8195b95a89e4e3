"""Generate on one process and on two tensor-parallel ranks: the same text.

python examples/generate_text.py [SOURCE]
"""

import sys
import tempfile
from pathlib import Path

import ladder_residual as ladder

PROMPTS = ["Once upon a time", "The little dog"]

with tempfile.TemporaryDirectory() as folder:
    source = sys.argv[1] if len(sys.argv) > 1 else ladder.export_demo(Path(folder, "stories"))
    for tp in (1, 2):
        for completion in ladder.generate(source, PROMPTS, tp=tp, wiring="ladder:last-half", max_new_tokens=30, temperature=0):
            print(f"tp {tp}: {completion.prompt}{completion.text}")
