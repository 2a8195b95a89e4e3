"""Reading Hugging Face checkpoints: a directory of safetensors and its ``config.json``. Pickles are never opened.

Everything a checkpoint says is checked before it is used, and what is wrong is a ``ValueError`` that names the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .sharding import Cut

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Tensors that older checkpoints store although they are computed, and a head that is tied to the embedding.
_COMPUTED = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "lm_head.weight", "embed_out.weight")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.([0-9]{1,9})\.")
_FLOATS = ("F64", "F32", "F16", "BF16")
# A mapped file's pages stay resident while it is open: reopen it now and then, so that peak memory is the shard and not the file.
REOPEN_AFTER_BYTES = 64 << 20
CONFIG_BYTES, INDEX_BYTES = 1 << 20, 64 << 20  # published ones have up to 50 KB and 15 MB
DIGEST_WHOLE_BYTES = 64 << 20
DIGEST_SAMPLE_BYTES = 4096


def resolve(source: str | Path, *, weights: bool = True) -> Path:
    """A local directory as it is, or a hub id fetched into the Hugging Face cache (only JSON, tokenizer and safetensors)."""
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{source} is a file; a checkpoint is a directory with config.json and safetensors")
    text = str(source)
    if text.count("/") > 1 or text.startswith((".", "/", "~")) or "\\" in text:
        raise ValueError(f"no checkpoint directory at {source}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", "*.jinja", "*.txt", "*.model"] + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(text, allow_patterns=patterns))
    except HFValidationError as error:
        raise ValueError(f"{source} is neither a directory nor a hub id (owner/name): {error}") from error
    except Exception as error:  # the hub client raises a dozen unrelated kinds for "not there", "no access" and "no network"
        raise ValueError(
            f"{source} is no local directory, and fetching it from the hub failed: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def read_json(path: Path, limit: int = CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file of at most ``limit`` bytes; a pipe or device in its place is refused and not waited for."""
    if not path.is_file():
        if path.exists():
            raise ValueError(f"{path} is not a file")
        raise ValueError(f"{path.parent} has no {path.name}; is it a Hugging Face checkpoint?")
    try:
        size = path.stat().st_size
        content = json.loads(path.read_text(encoding="utf-8")) if size <= limit else None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if size > limit:
        raise ValueError(f"{path} has {size} bytes, more than the {limit} that such a file may have")
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


class Checkpoint:
    """The tensors of a directory, by name, without loading them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_json(directory / "config.json")
        if self.config.get("quantization_config"):
            raise ValueError(f"{directory} is quantised; dequantise it first (this loader reads plain float weights)")
        self.files = self._locate()
        self.used: set[str] = set()  # names that were read
        self._open: tuple[str, Any, int] | None = None

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name."""
        if (self.directory / INDEX).exists():
            weight_map = read_json(self.directory / INDEX, INDEX_BYTES).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ValueError(f"{self.directory / INDEX} has no weight_map")
            for name, file in weight_map.items():
                if not isinstance(file, str) or not _is_plain_name(file):
                    raise ValueError(
                        f"{self.directory / INDEX} maps {name!r:.80} to {file!r:.80}: not a file of this directory"
                    )
            for file in sorted(set(weight_map.values())):
                if not (self.directory / file).is_file():
                    raise ValueError(f"{self.directory / INDEX} names {file}, which is missing")
            return weight_map
        if (self.directory / SINGLE).is_file():
            with self._safe_open(SINGLE) as handle:
                return dict.fromkeys(handle.keys(), SINGLE)
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in self.directory.glob(pattern))
        if pickles:
            raise ValueError(
                f"{self.directory} has only pickled weights ({pickles[0]}): a pickle can run any code, so it is never loaded. "
                f"Convert it where you trust it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        raise ValueError(f"{self.directory} has neither {SINGLE} nor {INDEX}")

    def _safe_open(self, file: str) -> Any:
        try:
            return safe_open(str(self.directory / file), framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{self.directory / file} is damaged or cut short: {error}") from error

    def _handle(self, file: str, upcoming: int) -> Any:
        if self._open is None or self._open[0] != file or self._open[2] > REOPEN_AFTER_BYTES:
            self._open = (file, self._safe_open(file), 0)
        name, handle, read = self._open
        self._open = (name, handle, read + upcoming)
        return handle

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        """Checked on the way: a tensor of whole numbers or packed bits would be read as weights without a word."""
        file = self.files[name]
        try:
            part = self._handle(file, 0).get_slice(name)
            shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
        except SafetensorError as error:
            raise ValueError(f"{self.directory / file} does not hold {name}: {error}") from error
        if dtype not in _FLOATS:
            raise ValueError(f"{self.directory / file}: {name} is stored as {dtype}; this loader reads {', '.join(_FLOATS)}")
        return shape

    def read(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """The tensor, or the part ``cut`` keeps of it; only that part is copied."""
        self.used.add(name)
        file = self.files[name]
        shape = self.shape(name)
        size = 4
        for length in shape:
            size *= length
        part = self._handle(file, size).get_slice(name)
        try:
            if cut is None:
                return part[:] if shape else self._handle(file, 0).get_tensor(name)
            before = (slice(None),) * cut.dim
            pieces = [part[(*before, slice(start, stop))] for start, stop in cut.ranges]
        except (SafetensorError, IndexError, ValueError) as error:
            raise ValueError(f"{self.directory / file}: cannot read {name} of shape {list(shape)}: {error}") from error
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=cut.dim)

    def dtype(self) -> str:
        """Of the first tensor, as safetensors writes it: F32, BF16, F16."""
        name = next(iter(self.files))
        return str(self._handle(self.files[name], 0).get_slice(name).get_dtype())

    def check_all_used(self) -> None:
        """ValueError if tensors were never asked for: the config describes another model than the weights make up."""
        left = [name for name in self.files if name not in self.used and not name.endswith(_COMPUTED)]
        if left:
            raise ValueError(
                f"{self.directory} holds {len(left)} tensors that its config.json has no place for ({', '.join(sorted(left)[:3])}): "
                f"one of them is wrong"
            )

    def check_layers(self, layers: int) -> None:
        """ValueError unless the weights have so many layers: found out before a model of that size is built."""
        held = {int(match[1]) for name in self.files if (match := _LAYER.search(name))}
        if held and max(held) + 1 != layers:
            raise ValueError(
                f"{self.directory} holds the weights of {max(held) + 1} layers, but its config.json calls for {layers}: "
                f"one of them is wrong"
            )

    def digest(self) -> str:
        """A fingerprint of the weights. Small files are read whole; of large ones the header, and of every tensor its beginning,
        middle and end: two trainings differ everywhere, and reading 100 GB on each host would take longer than the run."""
        fingerprint = hashlib.sha256()
        for file in sorted(set(self.files.values())):
            path = self.directory / file
            size = path.stat().st_size
            fingerprint.update(f"{file} {size} ".encode())
            with path.open("rb") as content:
                if size <= DIGEST_WHOLE_BYTES:
                    fingerprint.update(content.read())
                    continue
                length = int.from_bytes(content.read(8), "little")
                header = content.read(length)
                fingerprint.update(header)
                for name, tensor in json.loads(header).items():
                    if name == "__metadata__":
                        continue
                    first, last = (8 + length + offset for offset in tensor["data_offsets"])
                    for place in (first, (first + last) // 2, max(first, last - DIGEST_SAMPLE_BYTES)):
                        content.seek(place)
                        fingerprint.update(content.read(min(DIGEST_SAMPLE_BYTES, last - place)))
        return fingerprint.hexdigest()

    def close(self) -> None:
        self._open = None


def _is_plain_name(file: str) -> bool:
    """Of a file beside the index: no path, nothing that a file system refuses or reads as something else."""
    return (
        Path(file).name == file
        and file not in ("", ".", "..")
        and "\0" not in file
        and len(file.encode(errors="replace")) < 256
    )


def sources_of(name: str) -> Iterator[list[str]]:
    """Where a parameter may lie in a checkpoint: alternatives, each a list of templates (``{}`` is the expert).

    transformers 5 stacks the experts of a mixture; checkpoints keep them one by one under their older names.
    """
    yield [name]
    if not name.startswith("model."):
        yield [f"model.{name}"]
    else:
        yield [name.removeprefix("model.")]
    head, experts, tail = name.rpartition(".experts.")
    if experts:
        stems = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
        modern, mixtral = stems.get(tail, ((), ()))
        if modern:
            yield [f"{head}.experts.{{}}.{stem}.weight" for stem in modern]
            yield [f"{head.removesuffix('.mlp')}.block_sparse_moe.experts.{{}}.{stem}.weight" for stem in mixtral]
    elif ".mlp.gate." in name:
        yield [name.replace(".mlp.gate.", ".block_sparse_moe.gate.")]
