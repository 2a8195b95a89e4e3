"""Choose which layers to convert, by what each costs on a text.

python examples/select_layers.py [SOURCE TEXT]
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
    selection = ladder.select_layers(source, text, layers=2)
    selection.explain()
    conversion = ladder.convert(source, Path(folder, "converted"), selection.wiring)
    selection.save(conversion.target)
