"""What is fuzzed: each target breaks one kind of input and hands it to the code that reads it.

A target returns normally or raises a ``ValueError`` of this package's own (``verdict.py``); everything else is a finding. Targets
work in a directory of their own, ``box``, and must leave alone what lies beside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from .mutate import hostile_text, hostile_value, json_bytes, mutate_bytes, mutate_document

STORY = ["Once", "upon", "a", "time", "there", "was", "<s>", "</s>", "<unk>", "<|im_start|>system", "<|im_end|>", "[INST]"]
# Fields of families' configs that the demo's config lacks.
FIELDS = [
    "wiring",
    "ladder_layers",
    "layer_types",
    "sliding_window",
    "num_experts",
    "quantization_config",
    "auto_map",
    "rope_scaling",
]
FIELDS += [
    "torch_dtype",
    "tie_word_embeddings",
    "attention_multiplier",
    "model_type",
    "hidden_act",
    "head_dim",
    "partial_rotary_factor",
]
SETTINGS = [
    "temperature",
    "top_k",
    "top_p",
    "eos_token_id",
    "num_beams",
    "max_length",
    "bad_words_ids",
    "stop_strings",
    "do_sample",
]
SETTINGS += [
    "no_repeat_ngram_size",
    "cache_implementation",
    "suppress_tokens",
    "sequence_bias",
    "num_return_sequences",
    "guidance_scale",
]
RECIPE = """
[model]
preset = "smollm2-135m"
num_layers = 4
wiring = "ladder:last-half"
[data]
train = "shards"
sequence = 128
[batch]
rows = 8
[parallel]
tp = 2
[optimizer]
lr = 3e-4
betas = [0.9, 0.95]
warmup = 10
[run]
steps = 20
[checkpoint]
every = 5
"""


class Box:
    """A fresh copy of the demo checkpoint for one input, beside which nothing may change."""

    def __init__(self, directory: Path) -> None:
        from ...demo import demo_directory

        self.outside = directory / "outside"
        self.path = self.outside / "box"
        self.good = {path.name: path.read_bytes() for path in demo_directory().iterdir() if path.is_file()}
        self.outside.mkdir(parents=True, exist_ok=True)
        (self.outside / "secret.safetensors").write_bytes(self.good["model.safetensors"])

    def fresh(self, **changed: bytes | None) -> Path:
        """Empty the box and write the checkpoint into it; ``changed`` by file name, dots as ``__`` (None: without it)."""
        self.empty()
        files: dict[str, bytes | None] = {**self.good, **{name.replace("__", "."): data for name, data in changed.items()}}
        source = self.path / "checkpoint"
        source.mkdir(parents=True)
        for name, data in files.items():
            if data is not None and name not in ("stories.txt", "NOTICE.md"):
                (source / name).write_bytes(data)
        return source

    def empty(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    def intruders(self) -> list[str]:
        """What lies beside the box that was not put there."""
        return sorted(path.name for path in self.outside.iterdir() if path.name not in ("box", "secret.safetensors"))

    def json(self, name: str) -> Any:
        return json.loads(self.good[name])


def _broken_json(good: Any, chance: Random, extra: list[str] | None = None) -> bytes:
    if chance.random() < 0.75:
        return json_bytes(mutate_document(good, chance, extra or []))
    return mutate_bytes(json_bytes(good), chance)


def _read_everything(source: Path, chance: Random) -> None:
    """As the commands do: inspect, convert or load, with a wiring of one's own now and then."""
    from ...convert import convert
    from ...inspection import inspect_checkpoint
    from ...loading import load_model

    kind = chance.randrange(4)
    if kind == 0:
        inspect_checkpoint(source)
    elif kind == 1:
        convert(source, source.parent / "converted", chance.choice(["ladder", "standard", "ladder:last-half"]), copy=True)
    else:
        load_model(source, wiring=chance.choice([None, None, "ladder", "desync-2x"]))


def config(box: Box, chance: Random) -> None:
    _read_everything(box.fresh(config__json=_broken_json(box.json("config.json"), chance, FIELDS)), chance)


def generation_config(box: Box, chance: Random) -> None:
    from ...generate import Sampling, complete
    from ...loading import load_model
    from ...parallel import World

    model = load_model(box.fresh(generation_config__json=_broken_json(box.json("generation_config.json"), chance, SETTINGS)))
    complete(model, _demo_model()[1], ["Once", "a"], Sampling(max_new_tokens=2, seed=1), World())


def wiring(box: Box, chance: Random) -> None:
    from ...config import Wiring

    names = ["ladder", "standard", "parallel", "desync-2x", "delayed-1", "no-comm", "desync", "delayed-"]
    layers = ["", ":last-half", ":0-3", ":5", ":first-2,last-2", ":3-1", ":", ":-1", ":99999999999", ":٣", ":0-99999"]
    text = chance.choice(names) + chance.choice(layers) + chance.choice(["", "", "", "", "@2", "@", "@-1", "@99999999999999"])
    if chance.random() < 0.3:
        text = mutate_bytes(text.encode(), chance).decode("utf-8", "surrogateescape")
    count = chance.choice([1, 2, 5, 32, 32, 80, 100_000, 0, -1, 10**12])
    spec: Any = text if chance.random() < 0.95 else hostile_value(chance)
    parsed = Wiring.parse(spec, count)
    if Wiring.parse(parsed.spec, count) != parsed:
        raise AssertionError(f"{parsed.spec!r} does not parse back to the same wiring")


def recipe(box: Box, chance: Random) -> None:
    import tomllib

    from ...train.recipe import Recipe

    box.empty()
    path = box.path / "recipe.toml"
    if chance.random() < 0.5:
        document = mutate_document(tomllib.loads(RECIPE), chance, ["base", "log", "evaluate", "name", "options", "wandb"])
        path.write_bytes(_toml(document).encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(mutate_bytes(RECIPE.encode(), chance))
    override = f"{chance.choice(['run.steps', 'model.wiring', 'a', 'a.b.c'])}={chance.choice(['1', 'x', '[', ''])}"
    loaded = Recipe.load(path, [override] if chance.random() < 0.2 else [])
    _ = loaded.wiring, loaded.tokens_per_step


def _toml(value: Any) -> str:
    """Tables of plain values; what TOML cannot say comes out wrong, which is what is wanted."""
    lines, tables = [], []
    for key, item in value.items():
        if isinstance(item, dict):
            tables.append(f"[{json.dumps(key)}]\n" + "".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in item.items()))
        else:
            lines.append(f"{json.dumps(key)} = {json.dumps(item)}\n")
    return "".join(lines + tables)


def header(box: Box, chance: Random) -> None:
    """The header of the weights: lengths, names, shapes, offsets and dtypes that lie."""
    good = box.good["model.safetensors"]
    length = int.from_bytes(good[:8], "little")
    tensors, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    kind = chance.randrange(6)
    if kind == 0:  # the length itself
        lie = chance.choice([0, 1, length - 1, length + 1, len(good), 2**32, 2**63, 2**64 - 1])
        return _read_everything(box.fresh(model__safetensors=lie.to_bytes(8, "little") + good[8:]), chance)
    if kind == 1:
        return _read_everything(box.fresh(model__safetensors=mutate_bytes(good, chance)), chance)
    names = [name for name in tensors if name != "__metadata__"]
    tensor = tensors[chance.choice(names)]
    if kind == 2:
        tensor["dtype"] = chance.choice(["F64", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "C64", "x", 5, None])
    elif kind == 3:
        other = tensors[chance.choice(names)]["data_offsets"]
        tensor["data_offsets"] = chance.choice([other, [0, 2**62], [-1, 4], [8, 4], [0], "0-4", [0, len(data) + 1], [0.5, 8]])
    elif kind == 4:
        tensor["shape"] = chance.choice([[], [0], [-1], [2**40, 2**40], [1] * 300, "64", [64.0, 64], tensor["shape"][::-1]])
    else:
        tensors = mutate_document(tensors, chance, ["__metadata__"])
    written = json_bytes(tensors)
    return _read_everything(box.fresh(model__safetensors=len(written).to_bytes(8, "little") + written + data), chance)


def index(box: Box, chance: Random) -> None:
    """The index of a checkpoint in several files: paths that lead out, files that are not there, names that lie."""
    good = box.good["model.safetensors"]
    length = int.from_bytes(good[:8], "little")
    names = [name for name in json.loads(good[8 : 8 + length]) if name != "__metadata__"]
    document: Any = {"metadata": {"total_size": len(good)}, "weight_map": dict.fromkeys(names, "part.safetensors")}
    if chance.random() < 0.5:
        paths = [
            "../../secret.safetensors",
            "/etc/passwd",
            "..",
            ".",
            "",
            "a/b",
            "..\\x",
            "part.safetensors\0",
            "/dev/zero",
            "x" * 5000,
        ]
        document["weight_map"][chance.choice(names)] = chance.choice([*paths, 5, None, ["part.safetensors"]])
        written = json_bytes(document)
    else:
        written = _broken_json(document, chance)
    files: dict[str, bytes | None] = {
        "model__safetensors": None,
        "part__safetensors": good,
        "model__safetensors__index__json": written,
    }
    _read_everything(box.fresh(**files), chance)


def tokenizer(box: Box, chance: Random) -> None:
    from ...generate import load_tokenizer, tokenize

    name = chance.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"])
    source = box.fresh(
        **{name.replace(".", "__"): _broken_json(box.json(name), chance, ["auto_map", "chat_template", "model_max_length"])}
    )
    tokenize(load_tokenizer(source), ["Once upon a time", "a"], padding=True)


def prompt(box: Box, chance: Random) -> None:
    """Prompts of every kind through tokenizer and model."""
    from ...generate import Sampling, complete
    from ...parallel import World

    model, words = _demo_model()
    prompts = [hostile_text(chance, STORY) for _ in range(chance.choice([1, 1, 3]))]
    options: dict[str, Any] = {"max_new_tokens": chance.choice([1, 2, 3]), "temperature": chance.choice([0, 0.7, 1e-3])}
    if chance.random() < 0.2:
        options["stop"] = (hostile_text(chance, STORY)[:50],)
    complete(model, words, prompts, Sampling(seed=1, **options), World())


_DEMO: list[Any] = []


def _demo_model() -> tuple[Any, Any]:
    """Loaded once a process: it is not what is broken here."""
    if not _DEMO:
        from ...demo import demo_directory
        from ...generate import load_tokenizer
        from ...loading import load_model

        _DEMO.extend((load_model(demo_directory()), load_tokenizer(demo_directory())))
    return _DEMO[0], _DEMO[1]


def jsonl(box: Box, chance: Random) -> None:
    """Files of prompts: JSON lines and plain text."""
    from ...generate import check_text, read_prompts

    box.empty()
    rows: list[Any] = []
    for _ in range(chance.choice([1, 2, 5, 50])):
        text = hostile_text(chance, STORY)
        chat = {"messages": [{"role": chance.choice(["user", "system", "tool", ""]), "content": text}]}
        rows.append(chance.choice([{"prompt": text}, {"prompt": text}, chat, hostile_value(chance)]))
    content = b"\n".join(json_bytes(row) for row in rows)
    if chance.random() < 0.4:
        content = mutate_bytes(content, chance)
    path = box.path / chance.choice(["prompts.jsonl", "prompts.jsonl", "prompts.txt"])
    path.write_bytes(content)
    check_text(read_prompts(path, _demo_model()[1])[0])


TARGETS: dict[str, Callable[[Box, Random], None]] = {
    "config": config,
    "generation config": generation_config,
    "wiring": wiring,
    "recipe": recipe,
    "safetensors": header,
    "index": index,
    "tokenizer": tokenizer,
    "prompt": prompt,
    "jsonl": jsonl,
}
