"""Damaged and forged checkpoints. Those that would run code when they are unpickled make a file, whose absence is what tests look for."""

import hashlib
import json
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex


class Payload:
    """Unpickled, it makes ``marker``."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def forge_metadata(folder, kind, marker):
    """``pickle``: ``.metadata`` is the payload; ``bytes``: it names the payload as the value of a weight."""
    path = Path(folder) / ".metadata"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Payload(marker)))
    else:
        metadata = pickle.loads(path.read_bytes())
        name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
        torch.save(Payload(marker), path.with_name("payload"))
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = _StorageInfo("payload", 0, path.with_name("payload").stat().st_size)
        path.write_bytes(pickle.dumps(metadata))
    for checkpoint in (path.parent, path.parent.parent):  # that of `adapt` has its shards in a folder
        if (checkpoint / "complete.json").exists():
            right_checksums(checkpoint)


def right_checksums(checkpoint):
    """Whoever forges a file forges its checksum."""
    manifest = checkpoint / "complete.json"
    document = json.loads(manifest.read_text(encoding="utf-8"))
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path != manifest]
    document["files"] = {
        str(path.relative_to(checkpoint)): [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]
        for path in files
    }
    manifest.write_text(json.dumps(document), encoding="utf-8")


ODD_VALUES = (None, True, -1, 0, 1 << 70, 1.5, float("nan"), "", "x\x1b[2J", "../../etc", [], [[]], {}, {"a": 1})


def damage(folder, random):
    """Change one file of a training checkpoint, half of the time with its checksum made right again. Returns what was done."""
    folder = Path(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = random.choice(files)
    content = path.read_bytes()
    kinds = ["flip", "cut", "grow", "zeros", "other", "gone"] + ["value"] * 6 * (path.suffix == ".json")
    kind = random.choice(kinds)
    if kind == "gone":
        path.unlink()
    elif kind == "value":
        path.write_text(json.dumps(_with_odd_value(json.loads(content), random)), encoding="utf-8")
    else:
        spot, length = random.randrange(len(content)), random.choice([1, 1, 4, 64])
        noise = random.randbytes(length)
        changed = {
            "flip": content[:spot] + noise + content[spot + length :],
            "cut": content[:spot],
            "grow": content[:spot] + noise + content[spot:],
            "zeros": content[:spot] + bytes(length) + content[spot + length :],
            "other": random.choice(files).read_bytes(),
        }
        path.write_bytes(changed[kind])
    manifest = folder / "complete.json"
    forged = path != manifest and manifest.exists() and random.random() < 0.7
    if forged:
        right_checksums(folder)
    return path.name, kind, forged


def _with_odd_value(document, random):
    """A JSON document with one value replaced or removed, at any depth."""
    if not isinstance(document, dict | list) or not document or random.random() < 0.15:
        return random.choice(ODD_VALUES)
    key = random.choice(list(document)) if isinstance(document, dict) else random.randrange(len(document))
    changed = document.copy()
    if random.random() < 0.15:
        del changed[key]
    else:
        changed[key] = _with_odd_value(document[key], random)
    return changed
