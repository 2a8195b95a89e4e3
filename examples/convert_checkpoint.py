"""Convert a checkpoint, and load the result as any other Hugging Face model.

python examples/convert_checkpoint.py [SOURCE]
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM

import ladder_residual as ladder

with tempfile.TemporaryDirectory() as folder:
    source = sys.argv[1] if len(sys.argv) > 1 else ladder.export_demo(Path(folder, "stories"))
    conversion = ladder.convert(source, Path(folder, "converted"), "ladder:last-half")
    print(f"{conversion.before} -> {conversion.after}  {conversion.after.picture()}")

    model = AutoModelForCausalLM.from_pretrained(conversion.target)
    print(type(model).__name__, model.wiring)

    # The same in memory, without writing anything; weights are shared by all wirings.
    ladder.rewire(model, "ladder")
    print(type(model).__name__, model.wiring)
