"""What a refit found, layer by layer, on disk: an interrupted one goes on with the next layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from ..common.files import replace_text
from ..distributed.world import World
from ..models.checkpoint_reader import read_json
from ..models.finite import check_weight
from ..train.manifest import check_files, fingerprint, set_aside, write_manifest
from .refit import Found

_REQUEST, _WEIGHTS = "request.json", "found.safetensors"


class LayerStore:
    """``folder/layer-N``, each whole and with checksums, or absent. All ranks call its methods; rank 0 reads and writes."""

    def __init__(self, folder: Path, request: dict[str, Any], world: World, log: Callable[[str], None]) -> None:
        """ValueError where layers of another ``request`` are kept."""
        self.folder, self.world, self.log = folder, world, log
        file = folder / _REQUEST
        theirs = world.broadcast(read_json(file) if world.is_main and file.exists() else None)
        if theirs is None and world.is_main:
            replace_text(file, json.dumps(request, indent=1) + "\n")
        different = sorted(key for key in request if theirs and request[key] != theirs.get(key))
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
            draft = self.folder / ".saving"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            save_file({name: tensor.contiguous().cpu() for name, tensor in found.items()}, draft / _WEIGHTS)
            write_manifest(draft, {_WEIGHTS: fingerprint(draft / _WEIGHTS)}, {"layer": layer})
            draft.rename(self.folder / f"layer-{layer}")
