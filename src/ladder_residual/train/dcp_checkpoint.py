"""Tensors on disk through ``torch.distributed.checkpoint``, for ``train`` and for ``adapt`` under FSDP. Tensors alone, written and read.

Torch's own reader unpickles the checkpoint's ``.metadata`` and every value that is no tensor, so a forged checkpoint runs code. This
one builds nothing that a pickle asks for: it records the calls a metadata pickle consists of, takes names, shapes and places out of
the record, and refuses everything else.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _ReaderView

from ..models.chunks import Chunk

METADATA = ".metadata"
_ZIP = b"PK\x03\x04"
_MEMORIES = ("PUT", "BINPUT", "LONG_BINPUT")


def save_tensors(state: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write this rank's part of ``state``; all ranks of ``group`` call it (None: this process alone)."""
    other = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise TypeError(f"{other} is no tensor: it belongs into a JSON file beside the checkpoint")
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    _expect_one_process()
    try:
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # no Exception: it would pass every handler
        raise RuntimeError(root_cause(error)) from error


def load_tensors(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of ``state`` in place; ValueError for a checkpoint that is damaged, forged or of another model."""
    reader = _TensorReader(folder)
    reader.read_metadata()  # here, and not only inside the library, which would wrap what is wrong
    _expect_one_process()
    try:
        dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise ValueError(f"cannot load {folder}: {root_cause(error)}") from error


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor of a checkpoint."""
    return cast(dict[str, TensorStorageMetadata], _TensorReader(folder).read_metadata().state_dict_metadata)


def root_cause(error: BaseException) -> str:
    """One line out of what the library wraps around a failure: the system's own words if it had any, else the last line."""
    failures = getattr(error, "failures", None)
    if failures:
        inner = next(iter(failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    at: BaseException | None = error
    while at is not None and not isinstance(at, OSError):
        at = at.__cause__ or at.__context__
    lines = str(at or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _expect_one_process() -> None:
    """The library warns whenever it is used without ranks, which is meant here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class ShardOfWhole(Tensor):
    """A local tensor with its places in a whole one. Torch's checkpoint planners ask objects by these three methods (as of DTensor).

    With it a checkpoint knows nothing of the layout that wrote it: every number lies at its place in the whole model, and any other
    number of ranks, dp x tp, or a single process (export) reads what it needs. A DTensor cannot say it: ranks may hold several
    ranges of a fused projection, and copies of KV heads.
    """

    local: Tensor
    chunks: list[Chunk]
    whole: torch.Size
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, local: Tensor, chunks: list[Chunk], whole: tuple[int, ...]) -> ShardOfWhole:
        tensor = local.as_subclass(cls)
        tensor.local, tensor.chunks, tensor.whole = local, chunks, torch.Size(whole)
        return tensor

    def size(self, dim: Any = None) -> Any:  # the planners compare it with what is stored
        return self.whole if dim is None else self.whole[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(chunk.whole), torch.Size(chunk.size)) for chunk in self.chunks]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        chunk = next(chunk for chunk in self.chunks if torch.Size(chunk.whole) == index.offset)
        return chunk.of(self.local)


class _TensorReader(dcp.FileSystemReader):
    """Reads the metadata as a record of calls. Without entries of bytes in it, the library has nothing to unpickle."""

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        archive = cast(IO[bytes], _Slice(file, sinfo.offset, sinfo.length))
        check_unpacked_size(archive, sinfo.length, sinfo.relative_path)
        return super()._slice_file(file, sinfo)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            if path.exists() and not path.is_file():
                raise OSError(f"{METADATA} is not a file")  # a pipe is not waited for
            content = path.read_bytes()
            _check_memo(content)
            metadata = _metadata(_RecordingUnpickler(io.BytesIO(content)).load())
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
        except Exception as error:  # an unpickler fails in many ways on what is none
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{path} is no list of a checkpoint's tensors: {reason:.200}") from error
        for name in sorted({place.relative_path for place in metadata.storage_data.values()}):
            if not path.with_name(name).is_file():  # nor is a pipe waited for
                raise ValueError(f"{path} names {name:.80}, which is no file beside it")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Slice(_ReaderView):
    """Torch's own counts from its end in the wrong direction, and ``zipfile`` begins there."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset, whence = self.len + offset, os.SEEK_SET
        return super().seek(offset, whence)


def check_unpacked_size(archive: IO[bytes], size: int, name: str) -> None:
    """ValueError if ``archive``, a file of ``torch.save`` of ``size`` bytes, unpacks to more: nothing in one is compressed or shared."""
    unpacked = 0
    if archive.read(len(_ZIP)) == _ZIP:
        try:
            with zipfile.ZipFile(archive) as entries:
                unpacked = sum(entry.file_size for entry in entries.infolist())
        except Exception as error:  # zipfile fails in many ways on what is none
            raise ValueError(f"{name:.80} is damaged") from error
    archive.seek(0)
    if unpacked > size:
        raise ValueError(f"{name:.80} unpacks to {unpacked} bytes, and has {size}")


class _Call:
    """A call that a pickle asked for."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_RECORDED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    _METADATA_MODULE: {
        "Metadata", "StorageMeta", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath", "WindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "WindowsPath", "Path"},
    "builtins": {"getattr"},  # Python 3.11.0 to 3.11.3 write a member of an enumeration as that
}  # fmt: skip


class _RecordingUnpickler(pickle.Unpickler):
    """A class of its own for every name: what a pickle does to it, it does to nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):  # without lazy imports
            return dtype
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if name not in _RECORDED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no list of tensors needs")
        return type(name, (_Call,), {})


def _check_memo(content: bytes) -> None:
    """An unpickler takes memory for as many memories as the largest number of one: a few bytes could ask for all there is."""
    for opcode, number, _ in pickletools.genops(content):
        if opcode.name in _MEMORIES and int(number or 0) > len(content):
            raise ValueError(f"it counts {number} objects in {len(content)} bytes")


def _metadata(recorded: Any) -> Metadata:
    fields = _state(recorded, "Metadata")
    tensors: Any = {
        _typed(name, str): _tensor(name, entry) for name, entry in _typed(fields["state_dict_metadata"], dict).items()
    }
    places = {_index(index): _place(place) for index, place in _typed(fields["storage_data"], dict).items()}
    return Metadata(state_dict_metadata=tensors, storage_data=places)


def _tensor(name: str, entry: Any) -> TensorStorageMetadata:
    if type(entry).__name__ == "BytesStorageMetadata":
        raise ValueError(f"{name:.80} is a pickled object, which is never read: a checkpoint holds tensors alone")
    fields = _state(entry, "TensorStorageMetadata")
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in _typed(fields["chunks"], list)]
    properties = TensorProperties(dtype=_typed(_state(fields["properties"], "TensorProperties", tuple)[0], torch.dtype))
    size, parts = _size(fields["size"]), [(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    if sum(part.numel() for _, part in parts) != size.numel():  # the library leaves what no chunk covers as it was
        raise ValueError(f"the chunks of {name:.80} do not make a whole tensor of {list(size)}")
    return TensorStorageMetadata(properties, size, [ChunkStorageMetadata(*part) for part in parts])


def _index(recorded: Any) -> MetadataIndex:
    fields = _state(recorded, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(_typed(fields["fqn"], str), offset and _size(offset), index and _typed(index, int))


def _place(recorded: Any) -> _StorageInfo:
    fields = _state(recorded, "_StorageInfo")
    name = _typed(fields["relative_path"], str)
    if Path(name).name != name:
        raise ValueError(f"it leads out of its directory: {name!r:.80}")
    return _StorageInfo(name, _typed(fields["offset"], int), _typed(fields["length"], int))


def _state(recorded: Any, kind: str, wanted: type = dict) -> Any:
    if not isinstance(recorded, _Call) or type(recorded).__name__ != kind:
        raise ValueError(f"expected {kind}, found {type(recorded).__name__}")
    return _typed(recorded.state, wanted)


def _size(recorded: Any) -> torch.Size:
    if type(recorded).__name__ != "Size" or not isinstance(recorded, _Call):
        raise ValueError(f"expected a size, found {type(recorded).__name__}")
    lengths = [_typed(length, int) for length in recorded.arguments[0]]
    if any(length < 0 for length in lengths):
        raise ValueError(f"a size of {lengths}")
    return torch.Size(lengths)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value
