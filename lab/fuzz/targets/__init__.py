"""What is fuzzed: each target breaks one kind of input and hands it to the code that reads it.

A target returns normally, raises a ``ValueError`` of this package's own (``verdict.py``), or a ``SilentError`` where something else was
computed than the input says (``judge.py``); everything else is a finding. Targets work in a box and must leave alone what lies
beside it (``box.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from lab.fuzz.box import Box
from lab.fuzz.targets import checkpoints, quantised, results, settings, text, training

TARGETS: dict[str, Callable[[Box, Random], None]] = {
    "adapt checkpoint": training.adapt_checkpoint,
    "adapt recipe": settings.adapt_recipe,
    "chat template": text.chat_template,
    "config": checkpoints.config,
    "convert": checkpoints.convert_directory,
    "corpus": text.corpus,
    "evaluation": results.evaluation,
    "generation config": checkpoints.generation_config,
    "hardware": settings.hardware,
    "index": checkpoints.index,
    "jsonl": text.jsonl,
    "prompt": text.prompt,
    "quantised": quantised.quantised,
    "recipe": settings.recipe,
    "report": results.report,
    "safetensors": checkpoints.header,
    "source": text.source,
    "tokenizer": text.tokenizer,
    "train checkpoint": training.train_checkpoint,
    "weights": checkpoints.weights,
    "wiring": settings.wiring,
}
