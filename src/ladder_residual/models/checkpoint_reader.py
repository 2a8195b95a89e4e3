"""Reading Hugging Face checkpoints: a directory of safetensors and its ``config.json``. Pickles are never opened.

Everything a checkpoint says is checked before it is used, and what is wrong is a ``ValueError`` that names the file. torch is
imported when the first tensor is read: names, shapes and dtypes come from the headers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from ..common.suggest import did_you_mean
from .hub import fetch, may_be_hub_id
from .sharding import ShardSpec

if TYPE_CHECKING:
    from torch import Tensor

    from .presets import ModelShape

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Tensors that older checkpoints store although they are computed, and a head that is tied to the embedding.
HEADS, _EMBEDDINGS = ("lm_head.weight", "embed_out.weight"), ("embed_tokens.weight", "embed_in.weight")
_COMPUTED = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", *HEADS)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.([0-9]{1,9})\.")
_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
FLOATS = ("F64", "F32", "F16", "BF16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.*", "spiece.model", "tekken.json", "*.tiktoken")
# A mapped file's pages stay resident while it is open: reopen it now and then, so that peak memory is the shard and not the file.
REOPEN_AFTER_BYTES = 64 << 20
CONFIG_BYTES, INDEX_BYTES = 1 << 20, 64 << 20  # published ones have up to 50 KB and 15 MB
TOKENIZER_CONFIG_BYTES = 8 << 20  # published ones have up to 1.2 MB
DIGEST_WHOLE_BYTES = 64 << 20
DIGEST_SAMPLE_BYTES = 4096
BLOCK_BYTES = 1 << 20
_NO_GGUF = "use the safetensors of the model it was made from, or convert it with AutoModelForCausalLM.from_pretrained(..., gguf_file=...)"


def resolve(source: str | Path, *, weights: bool = True) -> Path:
    """A local directory as it is, or a hub id fetched into the Hugging Face cache (only JSON, tokenizer and safetensors)."""
    path, text = Path(source), str(source)
    if not text.strip():
        raise ValueError("the checkpoint's name is empty: give a directory with config.json, or a hub id owner/name")
    if path.is_dir():
        return path
    if address := _HUB_PAGE.match(text):
        raise ValueError(f"{text} is an address: give the hub id {address[1]}")
    if path.suffix == ".gguf":
        raise ValueError(f"{source} is a GGUF file, which is not read here: {_NO_GGUF}")
    if path.exists():
        raise ValueError(f"{source} is a file; a checkpoint is a directory with config.json and safetensors")
    if not may_be_hub_id(text):
        raise ValueError(
            f"no checkpoint directory at {source}{_directories_like(path)}; give a directory with config.json, or a hub id owner/name"
        )
    return fetch(text, ["*.json", "*.jinja", "*.txt", "*.model"] + (["*.safetensors"] if weights else []))


def _directories_like(path: Path) -> str:
    try:
        near = [entry.name for entry in path.parent.iterdir() if (entry / "config.json").is_file()]
    except OSError:
        near = []
    return did_you_mean(path.name, near)


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

    quantised = False  # whether this class reads such weights (quantization/checkpoint.py)

    def __init__(self, directory: Path, *, copies: bool = False, allow_nonfinite: bool = False) -> None:
        """``copies``: what is read has memory of its own. Otherwise it may be a view of the mapped file, whose pages then stay: fine
        for a whole model, but one that keeps a part of each file would hold all of it."""
        self.directory, self.copies, self.allow_nonfinite = directory, copies, allow_nonfinite
        self.config = read_json(directory / "config.json")
        if self.config.get("quantization_config") and not self.quantised:
            raise ValueError(f"{directory} is quantised, which cannot be continued here: give the model it was quantised from")
        self._headers: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}
        self.files = self._locate()
        self.names = dict.fromkeys(self.files)  # in the order of the files
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
                if not file.endswith(".safetensors"):
                    raise ValueError(f"{self.directory / INDEX} names {file!r:.80}, which is no .safetensors file")
                if not (self.directory / file).is_file():
                    raise ValueError(f"{self.directory / INDEX} names {file}, which is missing")
            if (self.directory / SINGLE).exists() and SINGLE not in weight_map.values():
                raise ValueError(
                    f"{self.directory} holds {SINGLE} beside an index that does not name it, and transformers would load that one: "
                    f"remove the one that is not meant"
                )
            return weight_map
        if (self.directory / SINGLE).is_file():
            return dict.fromkeys(self._header(SINGLE), SINGLE)
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in self.directory.glob(pattern))
        if pickles:
            raise ValueError(
                f"{self.directory} has only pickled weights ({pickles[0]}): a pickle can run any code, so it is never loaded. "
                f"Convert it where you trust it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        if ggufs := sorted(path.name for path in self.directory.glob("*.gguf")):
            raise ValueError(f"{self.directory} has only GGUF weights ({ggufs[0]}), which are not read here: {_NO_GGUF}")
        raise ValueError(f"{self.directory} has neither {SINGLE} nor {INDEX}: download the model again, with its weights")

    def _header(self, file: str) -> dict[str, tuple[tuple[int, ...], str]]:
        if file not in self._headers:
            self._headers[file] = stored_shapes(self.directory / file)
        return self._headers[file]

    def _handle(self, file: str, upcoming: int) -> Any:
        if self._open is None or self._open[0] != file or self._open[2] > REOPEN_AFTER_BYTES:
            self._open = (file, open_safetensors(self.directory / file), 0)
        name, handle, read = self._open
        self._open = (name, handle, read + upcoming)
        return handle

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def file_of(self, name: str) -> str:
        """Where a tensor is written again."""
        return self.files[name]

    def stored(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype, as the file's header has them."""
        file = self.files[name]
        if name not in self._header(file):
            raise ValueError(f"{self.directory / file} does not hold {name}, which {INDEX} places there")
        return self._header(file)[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Checked on the way: a tensor of whole numbers or packed bits would be read as weights without a word."""
        shape, dtype = self.stored(name)
        if dtype not in FLOATS:
            raise ValueError(
                f"{self.directory / self.files[name]}: {name} is stored as {dtype}; this loader reads {', '.join(FLOATS)}"
            )
        return shape

    def stored_bytes(self, name: str, spec: ShardSpec | None, itemsize: int) -> int:
        """What a rank that keeps ``spec`` of it holds, in numbers of ``itemsize`` bytes (quantised ones: of their own)."""
        shape = self.shape(name)
        return itemsize * prod(spec.local_shape(shape) if spec else shape)

    def check_cuts(self, shape: ModelShape, tp: int) -> None:
        """ValueError if sharding over ``tp`` ranks would cut through what must stay together: never, of plain weights."""

    def read(self, name: str, spec: ShardSpec | None = None) -> Tensor:
        """The tensor, or the part ``spec`` keeps of it; no more than that part is copied."""
        from .finite import check_weight

        self.used.add(name)
        self.shape(name)
        tensor = self.read_stored(name, spec)
        if not self.allow_nonfinite:
            check_weight(name, tensor, self.directory / self.files[name])
        return tensor

    def read_stored(self, name: str, spec: ShardSpec | None) -> Tensor:
        """As it lies in the file, whatever its dtype."""
        import torch

        file, shape = self.files[name], self.stored(name)[0]
        size = 4
        for length in shape:
            size *= length
        part = self._handle(file, size).get_slice(name)
        try:
            if spec is None:
                tensor = part[:] if shape else self._handle(file, 0).get_tensor(name)
            else:
                before = (slice(None),) * spec.dim
                kept = [part[(*before, slice(start, stop))] for start, stop in spec.ranges]
                tensor = kept[0] if len(kept) == 1 else torch.cat(kept, dim=spec.dim)
        except (SafetensorError, IndexError, ValueError) as error:
            raise ValueError(f"{self.directory / file}: cannot read {name} of shape {list(shape)}: {error}") from error
        if self.copies:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return tensor

    def dtype(self) -> str:
        """Of the first tensor, as safetensors writes it: F32, BF16, F16."""
        name, file = next(iter(self.files.items()))
        return self._header(file)[name][1]

    @staticmethod
    def is_computed(name: str) -> bool:
        """Stored by some, but computed or tied to another."""
        return name.endswith(_COMPUTED)

    def check_all_used(self) -> None:
        """ValueError if tensors were never asked for: the config describes another model than the weights make up."""
        left = [name for name in self.names if name not in self.used and not self.is_computed(name)]
        if left:
            raise ValueError(
                f"{self.directory} holds {len(left)} tensors that its config.json has no place for ({', '.join(sorted(left)[:3])}): "
                f"one of them is wrong"
            )

    def check_tied_head(self) -> None:
        """ValueError if the head is stored beside the embedding it is tied to and differs: either may be meant, and a wrong guess
        would compute another model without a word."""
        heads = [name for name in self.names if name.endswith(HEADS)]
        embeddings = [name for name in self.names if name.endswith(_EMBEDDINGS)]
        for head, embedding in itertools.product(heads, embeddings):
            blocks = itertools.zip_longest(self.blocks(head), self.blocks(embedding))
            if any(one != other for one, other in blocks):
                raise ValueError(
                    f"{self.directory}: {head} differs from {embedding}, but config.json says that they are tied: "
                    f"write tie_word_embeddings: false there if the head is meant, or remove {head}"
                )

    def blocks(self, name: str) -> Iterator[bytes]:
        """What the file holds of a tensor: its dtype, then its data, block by block."""
        with (self.directory / self.files[name]).open("rb") as content:
            header, start = raw_header(content, self.directory / self.files[name])
            tensor = json.loads(header).get(name)
            if tensor is None:
                raise ValueError(f"{self.directory / self.files[name]} does not hold {name}")
            yield tensor["dtype"].encode()
            first, last = tensor["data_offsets"]
            content.seek(start + first)
            for place in range(first, last, BLOCK_BYTES):
                yield content.read(min(BLOCK_BYTES, last - place))

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
                header, start = raw_header(content, path)
                fingerprint.update(header)
                for name, tensor in json.loads(header).items():
                    if name == "__metadata__":
                        continue
                    first, last = (start + offset for offset in tensor["data_offsets"])
                    for place in (first, (first + last) // 2, max(first, last - DIGEST_SAMPLE_BYTES)):
                        content.seek(place)
                        fingerprint.update(content.read(min(DIGEST_SAMPLE_BYTES, last - place)))
        return fingerprint.hexdigest()

    def close(self) -> None:
        self._open = None


def open_safetensors(file: Path, framework: str = "pt") -> Any:
    """Refuses a header that the file does not bear out. Where no tensor is made, "np" is imported faster."""
    try:
        return safe_open(str(file), framework=framework)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged or cut short: {error}") from error


def stored_shapes(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor, from the header."""
    with open_safetensors(file, "np") as handle:
        parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in parts.items()}


def raw_header(content: IO[bytes], file: Path) -> tuple[bytes, int]:
    """The header of a file at its beginning, and where its data begin."""
    open_safetensors(file, "np")  # it is in order
    length = int.from_bytes(content.read(8), "little")
    return content.read(length), 8 + length


def check_contained(directory: Path, names: Iterable[str]) -> None:
    """ValueError if one of these files is a link that leads out of the checkpoint. A snapshot in the hub's cache links into the
    ``blobs`` beside it, and no further."""
    homes = [directory.resolve()]
    if directory.parent.name == "snapshots":
        homes.append(directory.resolve().parents[1] / "blobs")
    for name in names:
        real = (directory / name).resolve()
        if not any(real.is_relative_to(home) for home in homes):
            raise ValueError(f"{directory / name} is a link that leaves the checkpoint: put the file itself there")


def has_tokenizer(directory: Path) -> bool:
    return any(any(directory.glob(pattern)) for pattern in _TOKENIZER_FILES)


def _is_plain_name(file: str) -> bool:
    """Of a file beside the index: no path, not hidden, nothing that a file system refuses or a terminal obeys."""
    return Path(file).name == file and file.isprintable() and not file.startswith(".") and 0 < len(file.encode()) < 256
