"""Checkpoints: configs, generation configs, headers, indexes, weights, and directories that ``convert`` is to take."""

from __future__ import annotations

import json
import math
import os
import struct
import warnings
from pathlib import Path
from random import Random
from typing import Any

import torch

from lab.fuzz.box import Box, fingerprint
from lab.fuzz.judge import check_model, require, same_bits, stored
from lab.fuzz.mutate import broken_json, json_bytes, mutate_bytes, mutate_document
from lab.fuzz.targets.demo import demo_model

# Fields of families' configs that the demo's config lacks.
FIELDS = ["wiring", "ladder_layers", "layer_types", "sliding_window", "num_experts", "quantization_config", "auto_map"]
FIELDS += ["rope_scaling", "torch_dtype", "tie_word_embeddings", "attention_multiplier", "model_type", "hidden_act"]
FIELDS += ["head_dim", "partial_rotary_factor"]
SETTINGS = ["temperature", "top_k", "top_p", "eos_token_id", "num_beams", "max_length", "bad_words_ids", "stop_strings"]
SETTINGS += ["do_sample", "no_repeat_ngram_size", "cache_implementation", "suppress_tokens", "sequence_bias"]
SETTINGS += ["num_return_sequences", "guidance_scale"]
WIRINGS = ["ladder", "standard", "ladder:last-half", "parallel"]


def read_everything(source: Path, chance: Random) -> None:
    """As the commands do: inspect, convert or load, with a wiring of one's own now and then. What is accepted is compared."""
    from ladder_residual.models.convert import convert
    from ladder_residual.models.inspect import inspect_checkpoint
    from ladder_residual.models.loading import load_model

    kind = chance.randrange(4)
    if kind == 0:
        about = inspect_checkpoint(source)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        held = {name: tensor for name, tensor in stored(source).items() if name != "lm_head.weight" or not tied(config)}
        require(about["layers"] == config["num_hidden_layers"], "inspect counts other layers than the config")
        require(
            about["parameters"] == sum(map(torch.Tensor.numel, held.values())), "inspect counts other parameters than there are"
        )
    elif kind == 1:
        wiring, target = chance.choice(WIRINGS), source.parent / "converted"
        before = fingerprint(source)
        convert(source, target, wiring, copy=chance.random() < 0.5)
        check_converted(source, target, wiring, before)
    else:
        own = chance.choice([None, None, "ladder", "desync-2x"])
        check_model(load_model(source, wiring=own), source, own)


def tied(config: dict[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings", False))


def check_converted(source: Path, target: Path, wiring: str, before: dict[str, str]) -> None:
    """The source as it was; weights bit for bit; the new wiring's output; nothing in the target that should not be there."""
    from ladder_residual.models.hf_config import STUB, stub_text
    from ladder_residual.models.loading import load_model

    require(fingerprint(source) == before, "convert changed its source")
    ours, theirs = stored(target), stored(source)
    require(ours.keys() == theirs.keys(), "convert changed the names of tensors")
    require(all(same_bits(ours[name], theirs[name]) for name in theirs), "convert changed weights")
    for path in target.iterdir():
        require(not path.is_symlink(), f"{path.name} is a link in the target")
        require(not path.name.startswith("."), f"the hidden file {path.name} went along")
        require(
            path.suffix != ".py" or (path.name == STUB and path.read_text() == stub_text()), f"code went along: {path.name}"
        )
        require(path.suffix == ".safetensors" or path.stat().st_nlink == 1, f"{path.name} is linked with another file")
    # A checkpoint may be converted although it cannot be used here (NaN, an odd generation config): loading says so.
    try:
        model = load_model(target)
    except ValueError:
        return
    check_model(model, source, wiring)


def config(box: Box, chance: Random) -> None:
    read_everything(box.fresh(config__json=broken_json(box.json("config.json"), chance, FIELDS)), chance)


def generation_config(box: Box, chance: Random) -> None:
    from ladder_residual.distributed.world import World
    from ladder_residual.generation.completion import complete
    from ladder_residual.generation.sampling import Sampling
    from ladder_residual.models.loading import load_model

    written = broken_json(box.json("generation_config.json"), chance, SETTINGS)
    model = load_model(box.fresh(generation_config__json=written))
    asked = json.loads(written)
    for name in ("temperature", "top_k", "top_p", "do_sample", "repetition_penalty"):
        if asked.get(name) is not None:
            found = getattr(model.generation_config, name)
            require(found == asked[name], f"{name} is {found!r:.40}, the file says {asked[name]!r:.40}")
    complete(model, demo_model()[1], ["Once", "a"], Sampling(max_new_tokens=2, seed=1), World())


def header(box: Box, chance: Random) -> None:
    """The header of the weights: lengths, names, shapes, offsets and dtypes that lie."""
    read_everything(box.fresh(model__safetensors=broken_header(box.good["model.safetensors"], chance)), chance)


def broken_header(good: bytes, chance: Random) -> bytes:
    tensors, data = split(good)
    length = len(good) - len(data) - 8
    kind = chance.randrange(6)
    if kind == 0:  # the length itself
        lie = chance.choice([0, 1, length - 1, length + 1, len(good), 2**32, 2**63, 2**64 - 1])
        return lie.to_bytes(8, "little") + good[8:]
    if kind == 1:
        return mutate_bytes(good, chance)
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
    return joined(tensors, data)


def split(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    length = int.from_bytes(file[:8], "little")
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def joined(tensors: Any, data: bytes) -> bytes:
    written = json_bytes(tensors)
    return len(written).to_bytes(8, "little") + written + data


def index(box: Box, chance: Random) -> None:
    """The index of a checkpoint in several files: paths that lead out, files that are not there, names that lie."""
    good = box.good["model.safetensors"]
    names = [name for name in split(good)[0] if name != "__metadata__"]
    document: Any = {"metadata": {"total_size": len(good)}, "weight_map": dict.fromkeys(names, "part.safetensors")}
    if chance.random() < 0.5:
        paths = ["../../secret.safetensors", "/etc/passwd", "..", ".", "", "a/b", "..\\x", "part.safetensors\0", "/dev/zero"]
        paths += ["x" * 5000, "config.json", "ladder_stub.py", "tokenizer.json", "model.safetensors.index.json"]
        document["weight_map"][chance.choice(names)] = chance.choice([*paths, 5, None, ["part.safetensors"]])
        written = json_bytes(document)
    else:
        written = broken_json(document, chance)
    files = {"model__safetensors": None, "part__safetensors": good, "model__safetensors__index__json": written}
    read_everything(box.fresh(**files), chance)


NOT_FINITE = [math.nan, -math.nan, math.inf, -math.inf]
LARGE = [3e38, -3e38, 1e30, 70000.0, 65504.0, 65520.0, -66000.0]
SMALL = [0.0, -0.0, 1e-45, 1e-38, -1e-41, 1e-7]


def weights(box: Box, chance: Random) -> None:
    """Single values of the weights: not finite, too large for a narrow dtype, too small, other signs; a head that is tied and stored."""
    from ladder_residual.models.loading import load_model

    tensors, data = split(box.good["model.safetensors"])
    written, names = bytearray(data), [name for name in tensors if name != "__metadata__"]
    values: list[float] = []
    for _ in range(chance.choice([1, 1, 1, 2, 50])):
        start, end = tensors[chance.choice(names)]["data_offsets"]
        place = start + 4 * chance.randrange((end - start) // 4)
        if chance.random() < 0.2:  # any bits
            written[place : place + 4] = chance.randbytes(4)
        elif chance.random() < 0.2:
            written[place + 3] ^= 0x80  # the sign
        else:
            written[place : place + 4] = struct.pack("<f", chance.choice(chance.choice([NOT_FINITE, LARGE, SMALL])))
        values += struct.unpack("<f", written[place : place + 4])
    doubled = chance.random() < 0.1
    if doubled:
        shape = tensors["model.embed_tokens.weight"]["shape"]
        tensors["lm_head.weight"] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [len(written), len(written) + 4 * math.prod(shape)],
        }
        written += bytes(4 * math.prod(shape))
    source = box.fresh(model__safetensors=joined(tensors, bytes(written)))
    if chance.random() < 0.2:
        return check_quantised(source)
    dtype = chance.choice(["auto", "auto", "float16", "bfloat16"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = load_model(source, dtype=dtype)
    require(all(map(math.isfinite, values)), f"a weight of {next((v for v in values if not math.isfinite(v)), 0)} was loaded")
    require(all(bool(parameter.isfinite().all()) for parameter in model.parameters()), f"a weight overflowed as {dtype}")
    require(
        not doubled or any("lm_head" in str(one.message) for one in said),
        "another head than the tied one was left out without a word",
    )
    check_model(model, source)
    if chance.random() < 0.3:
        generate_finite(model)


def check_quantised(source: Path) -> None:
    """What ``convert --quantize fp8`` writes is finite, and each number is within the rounding of its row."""
    from ladder_residual.models.convert import convert

    target = source.parent / "quantised"
    convert(source, target, quantize="fp8")
    ours, theirs = stored(target), stored(source)
    for name, weight in theirs.items():
        if name not in ours or f"{name}_scale" not in ours:
            require(same_bits(ours[name], weight), f"{name} is not quantised and was changed")
            continue
        found = ours[name].float() * ours[f"{name}_scale"].float()
        rounding = weight.abs() * 2**-4 + weight.abs().amax(1, keepdim=True) / 448 * 2**-9 + 1e-44
        require(bool(found.isfinite().all() and weight.isfinite().all()), f"{name} was written and is not finite")
        require(bool(((found - weight).abs() <= rounding).all()), f"{name} was quantised to something else")


def generate_finite(model: Any) -> None:
    """Logits that are not finite must stop a generation, never end it in a token."""
    from ladder_residual.distributed.world import World
    from ladder_residual.generation.completion import complete
    from ladder_residual.generation.sampling import Sampling

    tokenizer = demo_model()[1]
    complete(model, tokenizer, ["Once upon"], Sampling(max_new_tokens=2, seed=1), World())
    with torch.no_grad():
        logits = model(**tokenizer(["Once upon"], return_tensors="pt")).logits[:, -1]
    require(bool(logits.isfinite().all()), "text was generated from logits that are not finite")


def convert_directory(box: Box, chance: Random) -> None:
    """Links, code, hidden files, pipes and odd names in the source; targets that exist, hold links or contain the source."""
    from ladder_residual.models.convert import convert

    source, target = box.fresh(), box.path / "converted"
    out = chance.choice(
        ["../../.bashrc", "../../config.json", "../../secret.safetensors", "../../keep", "../..", str(box.outside / ".bashrc")]
    )
    for _ in range(chance.choice([0, 1, 1, 2])):
        plant(source, out, chance)
    if chance.random() < 0.5:  # something is there already
        target.mkdir()
        kept = chance.sample(sorted(box.good), chance.randrange(len(box.good)))
        for name in kept:
            (target / name).write_bytes(box.good[name])
        for name in chance.sample(["config.json", "ladder_stub.py", "model.safetensors", "notes.txt"], chance.randrange(3)):
            (target / name).unlink(missing_ok=True)
            os.symlink(out, target / name)
        if chance.random() < 0.1:
            (target / "folder").mkdir()
    if chance.random() < 0.1:
        target = chance.choice([source, source / "inside", box.path, source / "config.json"])
    before, there = fingerprint(source), fingerprint(box.path)
    wiring = chance.choice([*WIRINGS, "ladder:99", "x"])
    try:
        convert(source, target, wiring, copy=chance.random() < 0.3, overwrite=chance.random() < 0.6)
    except ValueError:
        require(fingerprint(box.path) == there, "convert refused and left something changed")
        raise
    if not target.is_relative_to(source):
        check_converted(source, target, wiring, before)
    require({path.name for path in box.path.iterdir()} <= {"checkpoint", "converted"}, "convert left a draft behind")


def plant(source: Path, out: str, chance: Random) -> None:
    """One thing in a checkpoint that does not belong there."""
    kind = chance.randrange(8)
    name = chance.choice(sorted(path.name for path in source.iterdir() if path.is_file() and not path.is_symlink()))
    if kind == 0:
        (source / name).unlink()
        os.symlink(out, source / name)
    elif kind == 1:
        place = source / chance.choice(["ladder_stub.py", "modeling.py", ".bashrc", "special_tokens_map.json", "notes.txt"])
        if not place.is_symlink():
            os.symlink(out, place)
    elif kind == 2:
        code = source / chance.choice(["ladder_stub.py", "modeling_evil.py", ".hidden", "x.pth", "sitecustomize.py"])
        if not code.is_symlink():
            code.write_text("import os\n")
    elif kind == 3:
        (source / name).unlink()
        os.mkfifo(source / name)
    elif kind == 4:
        (source / name).unlink()
        (source / name).mkdir()
    elif kind == 5:
        (source / name).write_bytes(mutate_bytes((source / name).read_bytes(), chance))
    elif kind == 6:
        odd = chance.choice(["a\nb.json", "\x1b[31m.txt", "x" * 250 + ".md", " .json", "-rf.txt", "\udcff.json"])
        (source / odd).write_bytes(b"{}")
    else:
        os.symlink("config.json", source / f"inside-{chance.randrange(9)}-{len(list(source.iterdir()))}.json")
