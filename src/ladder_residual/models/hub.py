"""Files of a model on the Hugging Face hub. No torch."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

CONNECT_SECONDS = 3.0
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class _OfflineError(Exception):
    pass


def may_be_hub_id(text: str) -> bool:
    """``owner/name``, unless there is a directory ``owner`` here: then a path is meant."""
    owner, slash, name = text.partition("/")
    return bool(slash and _PART.fullmatch(owner) and _PART.fullmatch(name) and not Path(owner).is_dir())


def fetch(name: str, patterns: list[str]) -> Path:
    """The directory in the hub's cache that holds the files of ``name`` (``owner/name``) that match; fetched if there is a network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        _check_reachable()
        return Path(snapshot_download(name, allow_patterns=patterns))
    except _OfflineError as offline:
        try:
            return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ValueError(
                f"{name} is no local directory, and the hub cannot be reached ({offline}): give the path of a directory, or go online"
            ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"{name} is neither a local directory nor a model on the hub that you may read: check the name, or run `hf auth login`"
        ) from None
    except Exception as error:  # the hub's client raises a dozen unrelated kinds
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"{name} is no local directory, and fetching it from the hub failed: {said}") from error


def _check_reachable() -> None:
    """Without a network the hub's client tries again for half a minute. One attempt to connect says the same at once."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise _OfflineError("HF_HUB_OFFLINE is set")
    address = urlsplit(constants.ENDPOINT)
    if proxy := getproxies().get(address.scheme):
        address = urlsplit(proxy)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise _OfflineError(f"{address.hostname}: {error.strerror or error}") from error
