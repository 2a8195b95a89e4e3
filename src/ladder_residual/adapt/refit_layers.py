"""What a refit found, layer by layer, on disk: an interrupted one goes on with the next layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from ..common.files import replace_text
from ..distributed.world import World
from ..models.checkpoint_reader import read_json
from ..models.finite import check_weight
from ..train.manifest import check_files, fingerprint, set_aside, write_manifest
from .refit import Found

_REQUEST, _WEIGHTS, _DRAFT, _LOCK = "request.json", "found.safetensors", ".saving", ".lock"


class LayerStore:
    """``folder/layer-N``, each whole and with checksums, or absent. All ranks call its methods; rank 0 reads and writes."""

    def __init__(self, folder: Path, request: dict[str, Any], world: World, log: Callable[[str], None]) -> None:
        """ValueError where layers of another ``request`` are kept, or anything else."""
        self.folder, self.world, self.log = folder, world, log
        file = folder / _REQUEST
        foreign = world.is_main and not file.exists() and any(path.name not in (_DRAFT, _LOCK) for path in folder.iterdir())
        if world.broadcast(foreign):
            raise ValueError(
                f"{folder} is where finished layers are kept, and holds other files: move them, or choose another target"
            )
        theirs = world.broadcast(read_json(file) if world.is_main and file.exists() else None)
        if theirs is None and world.is_main:
            replace_text(file, json.dumps(request, indent=1) + "\n")
        different = sorted(key for key in request if theirs is not None and request[key] != theirs.get(key))
        if different:
            raise ValueError(
                f"{folder} keeps the layers of another refit ({', '.join(different)}): delete it, or choose another target"
            )
        if done := sum(path.name[6:].isdecimal() for path in folder.glob("layer-*")):
            log(f"resume   {done} layers are in {folder}")

    def get(self, layer: int) -> Found | None:
        path = self.folder / f"layer-{layer}"
        found: Found | None = None
        if self.world.is_main and path.is_dir():
            if problem := check_files(path):
                set_aside(path)
                self.log(f"damaged  {path} ({problem}): layer {layer} is fitted again")
            else:
                found = load_file(path / _WEIGHTS)
                for name, tensor in found.items():
                    check_weight(name, tensor, path)
        return self.world.broadcast(found)

    def __setitem__(self, layer: int, found: Found) -> None:
        if self.world.is_main:
            draft = self.folder / _DRAFT
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            save_file({name: tensor.contiguous().cpu() for name, tensor in found.items()}, draft / _WEIGHTS)
            write_manifest(draft, {_WEIGHTS: fingerprint(draft / _WEIGHTS)}, {"layer": layer})
            draft.rename(self.folder / f"layer-{layer}")

    def remove(self) -> None:
        """Layers before the request: without it nobody could tell whose they are. What else was put there stays."""
        if not self.world.is_main:
            return
        for path in (*self.folder.glob("layer-*"), self.folder / _DRAFT):
            shutil.rmtree(path, ignore_errors=True)
        for name in (_REQUEST, _LOCK):
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()
