"""Reads what ``torch.distributed.checkpoint`` wrote, without trusting it.

Tensors are loaded as data; only the list of them is a pickle. A pickle can name any function, so names are looked up in a list of
their own: what a checkpoint's list consists of, and nothing else.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "StorageMeta", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath", "WindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "WindowsPath", "Path"},
    "collections": {"OrderedDict"},
}  # fmt: skip


def _member(owner: Any, name: str) -> Any:
    """Python 3.11 up to 3.11.3 writes a member of an enumeration as ``getattr`` of it: that much of ``getattr`` is allowed."""
    if not (isinstance(owner, type) and issubclass(owner, Enum)) or name not in owner.__members__:
        raise pickle.UnpicklingError(f"it takes {name!r:.40} of {owner!r:.60}, which no list of tensors needs")
    return owner[name]


class _ListOfTensors(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no list of tensors needs")
        return super().find_class(module, name)


class CheckpointReader(dcp.FileSystemReader):
    """ValueError for a list of tensors that is anything else, or leads out of the checkpoint's directory."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            with self.fs.create_stream(path, "rb") as file:
                metadata = _ListOfTensors(file).load()
            places = {info.relative_path for info in metadata.storage_data.values()}
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, IndexError, KeyError) as error:
            raise ValueError(f"{path} is no list of a checkpoint's tensors: {error}") from error
        outside = [place for place in places if Path(place).name != str(place)]
        if outside:
            raise ValueError(f"{path} leads out of its directory: {outside[0]!r:.80}")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
