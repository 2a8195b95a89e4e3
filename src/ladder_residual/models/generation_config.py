"""A checkpoint's ``generation_config.json``: read, and checked before ``generate`` meets it in the middle of a run.

Only what stands here is taken over; anything else transformers knows (watermarks, assistants, caches ...) is named in a warning.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint_reader import read_json

if TYPE_CHECKING:
    from transformers import GenerationConfig

FILE = "generation_config.json"
LEAST_TEMPERATURE = 1e-4  # below, probabilities overflow float32; 0 itself is greedy
_TOKENS = ("bos_token_id", "pad_token_id", "eos_token_id")
_LISTS = ("suppress_tokens", "begin_suppress_tokens")
RANGES = {
    "temperature": (0, 1000),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": (1e-6, 1000),
    "length_penalty": (-1000, 1000),
}
_WHOLE = ("top_k", "num_beams", "max_length", "min_length", "max_new_tokens", "min_new_tokens", "no_repeat_ngram_size")
_SWITCHES = ("do_sample", "use_cache", "renormalize_logits")
# About the file, or about the form of an answer, which is ours to choose.
_ABOUT = (
    "transformers_version",
    "_from_model_config",
    "_commit_hash",
    "return_dict_in_generate",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
)


def generation_config(directory: Path, vocabulary: int) -> GenerationConfig | None:
    """None if the checkpoint has none; ValueError naming file and field if it asks for what cannot be."""
    path = directory / FILE
    if not path.exists():
        return None
    fields = {name: value for name, value in read_json(path).items() if value is not None and name not in _ABOUT}
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _TOKENS or name in _LISTS:
            tokens = value if isinstance(value, list) and name not in _TOKENS[:2] else [value]
            if not all(_is_whole(token) and 0 <= token < vocabulary for token in tokens):
                raise ValueError(f"{path}: {name} is {value!r:.60}, expected tokens from 0 to {vocabulary - 1}")
            value = list(tokens) if name in _LISTS else value
            if not tokens:
                continue
        elif name in RANGES:
            low, high = RANGES[name]
            if not _is_number(value) or not low <= value <= high or (name == "temperature" and 0 < value < LEAST_TEMPERATURE):
                raise ValueError(f"{path}: {name} is {value!r:.40}, expected a number between {low} and {high}")
        elif name in _WHOLE:
            if not _is_whole(value) or not 0 <= value < 2**31:
                raise ValueError(f"{path}: {name} is {value!r:.40}, expected a whole number")
        elif name in _SWITCHES and not isinstance(value, bool):
            raise ValueError(f"{path}: {name} is {value!r:.40}, expected true or false")
        elif name not in _SWITCHES:
            continue
        kept[name] = value
    left_out = sorted(fields.keys() - kept.keys() - {"eos_token_id", *_LISTS})
    if left_out:
        warnings.warn(f"{path}: not used here: {', '.join(name[:40] for name in left_out[:8])}", stacklevel=2)
    from transformers import GenerationConfig

    try:
        return GenerationConfig(**kept)
    except Exception as error:  # its checks raise several kinds
        raise ValueError(f"{path} is not a generation config transformers can use: {str(error)[:300]}") from error


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return (_is_whole(value) or isinstance(value, float)) and math.isfinite(value)  # type: ignore[arg-type]
